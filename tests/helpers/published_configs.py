"""Fields of published models' config.json, under a model type that no reader knows."""

DEEPSEEK_V3 = {
    "model_type": "deepseek_of_tomorrow", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280, "max_position_embeddings": 163840,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "tie_word_embeddings": False,
}  # fmt: skip
