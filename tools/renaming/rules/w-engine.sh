#!/bin/bash
# Strings and keywords that no rule of w-engine.txt can say. Run in the root of the checkout AFTER all renames, words and keys
# of all writers and BEFORE the moves (it names today's paths). Every substitution may be run twice.
set -e
q() { perl -pi -e "$1" "${@:2}"; }   # q EXPRESSION FILES
# -- keywords of dataclasses.replace, NamedTuple._replace and st.builds, which pyright does not follow
q 's/\bevicted=sequence/num_evicted_tokens=sequence/' workbench/cache/holdings.py
q 's/replace\(shape, table=table, recent=recent\)/replace(shape, group=table, residual_group=recent)/' workbench/cache/shapes.py
q 's/\bsample_rows=torch/logits_indices=torch/; s/\bsettles=False/quantize_on_write=False/g' workbench/engine/captured.py
q 's/\breads=/attention=/g; s/\bvetted=/checked=/g' workbench/engine/{fitting,lanes,layout,trial}.py tests/engine/test_prefill.py tests/engine/test_vetting.py
q 's/\bfault=request/invalid_reason=request/' workbench/engine/intake.py
q 's/replace\((wishes|decision), tokens=tokens, (set_back|preempted)=(set_back|preempted)\)/replace($1, num_scheduled_tokens=tokens, preempted=$3)/' workbench/engine/lawful.py
q 's/replace\((wishes|decision), tokens=/replace($1, num_scheduled_tokens=/; s/\bbecause=\{/reasons={/' workbench/engine/policies.py tests/fleet/scenes.py tests/testing/test_policy_kit.py
q 's/\bset_back=backs/preempted=backs/' tests/testing/test_policy_kit.py
q 's/^(            )needs=\{/$1pages_needed={/; s/^(            )gives=\{/$1pages_released={/; s/^(            )cached=\{/$1cached_tokens={/; s/^(            )served=\{/$1served_tokens={/; s/^(            )queue=None/$1waiting_index=None/' workbench/engine/policy.py
q 's/\bsamples=last, scored=scored, drafts=drafts/needs_sample=last, requested_logits=scored, draft_token_ids=drafts/; s/chunks=CONTEXT_SPLITS, together=True/chunks=CONTEXT_SPLITS, together=True/' workbench/engine/rows.py
q 's/, drafts=drafts\)/, draft_token_ids=drafts)/' workbench/engine/trials.py
q 's/_replace\(scored=/_replace(requested_logits=/' workbench/study/forced.py tests/engine/scribe.py
q 's/\bwhole=request\.sampling/final_only=request.sampling/' workbench/offline/lines.py
q 's/replace\(plain, whole=/replace(plain, final_only=/' tests/engine/test_whole.py
q 's/\bown_filters=\(rule,\)/custom_filters=(rule,)/' workbench/sampling/stages.py
q 's/_replace\(tokens=\(\*ask/_replace(num_scheduled_tokens=(*ask/; s/_replace\((set_back|preempted)=/_replace(preempted=/; s/_replace\((because|reason)=/_replace(reasons=/' workbench/trace/script.py
q 's/replace\(batch, slots=/replace(batch, slot_mapping=/; s/replace\(batch, ids=/replace(batch, token_ids=/' tests/engine/test_trial.py
q 's/replace\(odd, dim=/replace(odd, head_dim=/' tests/cache/test_quantized.py
q 's/(CacheShape|KVCacheSpec), groups=st\.integers\(1, 4\), dim=st\.integers\(1, 16\), table=/$1, num_kv_heads=st.integers(1, 4), head_dim=st.integers(1, 16), group=/' tests/cache/test_store.py
q 's/\("decode", "reads"\)/("decode", "attention")/' workbench/engine/packed_lanes.py
# -- `lanes` as a local name, parameter and keyword of these rooms (attributes are renamed; import paths are not touched)
q 's/(?<![.\w])(?<!import )lanes(?!\w)(?! as )/backends/g' workbench/engine/*.py tests/engine/*.py
# -- keywords that reach Runner through `runner_of(model, **settings)`
q 's/(?<![\w.])drafts=(?=drafts\(|Drafts\(|Speculator\()/speculator=/g' tests/engine/*.py
q 's/drafts=drafts, clock=clock/speculator=drafts, clock=clock/' tests/engine/test_replay.py
q 's/(?<![\w.])note=(?=recorder|told)/listener=/g' tests/engine/test_best_of.py tests/engine/test_samples.py tests/engine/test_faults.py
# -- monkeypatched or reached by name
q 's/setattr\(Span, "ids"/setattr(Span, "token_ids"/; s/setattr\((Holdings|KVCacheManager), "cut"/setattr($1, "free_rejected_drafts"/' tests/engine/test_speculation.py
q 's/setattr\(Evictor, "count"/setattr(Evictor, "add_mass"/; s/setattr\((Budget|EvictionBudget), "left"/setattr($1, "tokens_until_eviction"/' tests/testing/test_evict_kit.py
q 's/getattr\(given, "asked"/getattr(given, "load_arguments"/' workbench/widgets/tokens/view.py
# -- sampling/__init__.py: __all__, whatever pyright did to it
python3 - <<'P'
import pathlib, re
p = pathlib.Path("workbench/sampling/__init__.py"); s = p.read_text(); head, _, tail = s.partition("__all__ = [")
new = {"Choice": "SampledToken", "Chooser": "Sampler", "Draw": "RandomSampler", "Sampler": "TokenSampler", "pipeline": "build_filters"}
if '"Chooser"' in tail: tail = re.sub(r'"(\w+)"', lambda m: f'"{new.get(m[1], m[1])}"', tail)
p.write_text(head + "__all__ = [" + tail)
P
# -- messages, wherever they stand (code, tests that match them, notebooks, README)
L=$(grep -rlE "gives way|[Ww]ishes|wish \{|from the host|on the host|stand in pages|stands? twice|stands inside|sets? it back|sets back|set back|set-back|nobody else's prefix|goes? on with somebody|or \"nobody\"|is not held|without a packed|are packed|both packed|is packed|the last in turn|own module|of the user's own|score of your own|module of your own|layers of table" --include=*.py --include=*.md workbench/*.py workbench/{cache,engine,sampling,prompt,offline,trace,widgets,study,fleet,testing} tests notebooks README.md docs 2>/dev/null | grep -v ledger || true)
q 's/\{need\}; who waits gives way/{need}; a waiting request is preempted/g; s/who waits gives way/a waiting request is preempted/g; s/the last in turn/the last in order/g; s/ gives way/ is preempted/g unless /which gives way|of who gives way/' $L
q 's/tokens come back from the host/tokens swapped in from the CPU/g; s/came back from the host after a (set-back|preemption)/were swapped in from the CPU after a preemption/g; s/"come back from the host"/"swapped in from the CPU"/g; s/pages saved on the host/pages swapped out to the CPU/g; s/tokens stand in pages that it shares/tokens are in shared pages/g' $L
q 's/"set back"/"preempted"/g; s/: set back in step/: preempted in step/g; s/ set it back"/ preempted it"/g; s/of sequences that were set back/of preempted sequences/g' $L
q 's/wish \{place\} sets back/entry {place} preempts/g; s/wish \{place\} is/entry {place} is/g; s/\{name\}: wishes for/{name}: schedules/g; s/f"wishes for \{/f"schedules {/g; s/f"wishes \{tokens/f"schedules {tokens/g; s/ and sets it back in the same step/ and preempts it in the same step/g; s/must give engine\.policy\.(Wishes|SchedulerDecision)/must return scheduler.policy.SchedulerDecision/g; s/gave \{type\((wishes|decision)\)/returned {type($1)/g; s/it must go on with somebody/it must schedule a request/g' $L
q 's/policy wild: wishes/policy wild: schedules/g' tests/engine/history.py
q 's/"wishes -1 tokens/"schedules -1 tokens/g; s/gave (\w+), must give engine/returned $1, must return scheduler/g' tests/engine/test_faults.py
q 's/"wishes" in job\.error/"schedules" in job.error/g; s/"wishes" not in job\.error/"schedules" not in job.error/g' tests/fleet/test_fleet.py
q 's/are nobody else\x27s prefix/cannot be shared/g; s/or "nobody"\)/or "none")/g; s/is not held"/is not referenced"/g; s/match="not held"/match="not referenced"/g; s/layers of table \{/layers of cache group {/g' $L
q 's/rotate without a packed format/rotate without a quantized format/g; s/(keys|values|\{name\}) are packed \{each\}/$1 are quantized {each}/g; s/int4 keys are packed 8/int4 keys are quantized 8/g; s/both packed/both quantized/g; s/its cache is packed: tokens are settled between steps/its cache is quantized: tokens are quantized between steps/g' $L
q 's/a layer\x27s own module/a custom attention module/g; s/an attention module of (the user\x27s|your) own/a custom attention module/g; s/a mask or score of your own/a custom mask or score/g; s/an attention module of the user\x27s own/a custom attention module/g' $L
q 's/ stands twice, in lines/ is given twice, in lines/g; s/a key stands twice/a key is given twice/g; s/stands inside of what it repeats/is inside of what it repeats/g' workbench/files.py $(grep -rlE "stands twice|stands inside" --include=*.py tests | grep -v -E "ledger|records" || true)
q 's/answers are owed, and nobody computes them/lines are unfinished, and no request is running/' workbench/offline/run.py
# -- texts of the parts that a person reads
q 's/^# ## Too few pages: somebody is set back/# ## Too few pages: a request is preempted/' notebooks/07_many_requests.py
q 's/so few that sequences are set back/so few that sequences are preempted/; s/"set-backs, /"preemptions, /; s/\} "$/} "/' experiments/soak.py
# -- code in strings
q 's/workbench\.engine\.executors\.pack\b/workbench.executors.base.pack_batch/' tests/testing/test_evict_kit.py
# -- the local name `told`
q 's/\btold\b/message/g' workbench/cache/{evict,shapes}.py workbench/engine/{cache,evicting,inspection,invariant_lanes,layout,vetting}.py workbench/errors.py
q 's/\btold\b/each/g' workbench/engine/mail.py
q 's/\btold\b/ranked/g' workbench/engine/best_of.py
q 's/\btold\b/bound/g' workbench/engine/prefill.py
q 's/(?<!\.)\btold\b/parts/g' workbench/engine/plan.py workbench/engine/trial.py
q 's/\btold\b/details/g' workbench/trace/tracks.py workbench/trace/events.py
q 's/\btold\b/markup/g' workbench/shown.py
q 's/\btold\b/label/g' workbench/engine/inspection_shown.py
