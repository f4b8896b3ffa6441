"""Sarathi-Serve: prompts are cut into chunks that fill the steps of those that decode, so that none of them stalls.

Agrawal et al., 2024, "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", algorithm 3: a step has
a budget of tau tokens. All decodes are in it, then what is left goes to the prompts that have begun, then to new ones:

    chunk  =  min(tokens left of the prompt,  tau - decodes - chunks so far)

Every step then takes about as long, which is the longest gap between two tokens. It is what `fcfs` does here; the
baseline is prefill first with whole prompts, as vLLM had it in 2023. tau is `max_num_batched_tokens`.
"""
