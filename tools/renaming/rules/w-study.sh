#!/bin/bash
# Strings that no rule of w-study.txt can say. Run in the root of the checkout AFTER all renames, words and keys of all writers
# and BEFORE the moves (it names today's paths). Every substitution may be run twice.
set -e
q() { perl -pi -e "$1" "${@:2}"; }   # q EXPRESSION FILES
# -- fakes of protocols in tests
q 's/^(    )requests: int = 0/$1num_requests: int = 0/; s/\bbacklog\b/pending_prompt_tokens/g; s/def cached\(/def cached_tokens(/; s/aware\.cached\(/aware.cached_tokens(/; s/\)\.requests ==/).num_requests ==/; s/view\.requests\b/view.num_requests/g' tests/fleet/test_routers.py
# -- column of the table of determinism, after `key company -> determinism`; the table `asked` of a determinism run is `outputs`
q 's/\{"prompt": index, "(company|determinism)": kind/{"prompt": index, "batch_composition": kind/; s/each\["(company|determinism)"\]/each["batch_composition"]/; s/tables = \{"asked": asked\}/tables = {"outputs": asked}/; s/^REPEATED_REQUEST = "asked"/REPEATED_REQUEST = "repeated"/' workbench/study/company.py
q 's/"(company|determinism)": "(varying|same)"/"batch_composition": "$2"/; s/asked\.parquet/outputs.parquet/' tests/study/test_company.py
q 's/outputs in varying company/outputs in varying batches/g' workbench/study/comparison_text.py experiments/determinism.py experiments/claims/ledger.json
q 's/varying company/varying batches/g; s/(the|in|even the) same company/$1 same batch/g; s/in any company/in any batch/g; s/in other company/in other batches/g; s/rounds in company/rounds in a batch/g; s/depend on company/depend on the batch/g; s/change with the company/change with the batch/g; s/"company never changes a bit/"batches never changes a bit/; s/batches never changes a bit/batches never change a bit/' experiments/determinism.py experiments/claims/ledger.json experiments/records/determinism-*.json tests/experiments/*.py
q 's/"prompts that part"/"diverged prompts"/' workbench/study/comparison_text.py
# -- labels and messages
q 's/"kept promise"/"SLO attainment"/' workbench/study/comparison_text.py
q 's/requests that (kept|met) the (promise|SLO)/SLO attainment/; s/pages in use in which nothing stands/pages in use without tokens/' workbench/study/curves.py
q 's/where a lane does not tell its kernels\x27 time/where a backend does not report kernel time/; s/, lane \{/, backend {/; s/others took \{(\w+):\.0%\} of the processor: do not trust these times/contention by other processes: {$1:.0%} of the processor; times are unreliable/' workbench/study/bench_text.py
q 's/; others took \{(\w+)/; contention {$1/' workbench/study/kernel_tables.py
q 's/\(others took \{(\w+):\.0%\} of the processor: do not trust it\)/(contention: {$1:.0%} of the processor; unreliable)/' workbench/peers/table.py
q 's/lane mlir does not work here/backend mlir does not work here/' workbench/study/decode_step_stages.py
q 's/"lane mlir: /"backend mlir: /; s/lane auto /backend auto /' workbench/study/doctor.py
q 's/is each operator on each lane\?/is each operator on each backend?/' workbench/study/kernel_bench.py
q 's/f"lane \{/f"backend {/; s/f"stand \{n\}"/f"accepted {n}"/; s/"speculation", "checks"/"speculation", "verifications"/; s/of the steps that check"/of the verifying steps"/' workbench/study/run_sheets.py
q 's/"stand": stand/"accepted": stand/; s/stand:O/accepted:O/; s/drafted tokens that stand/accepted draft tokens/; s/share of the checks/share of the verifications/' workbench/study/speculation_chart.py
q 's/, or nobody runs"/, or none runs"/' workbench/study/interruption_workload.py
q 's/4-grams that stood before in the text/repeated 4-grams/' workbench/study/texts_chart.py
q 's/a clock cannot tell which proposals are accepted/a clock does not know which proposals are accepted/' workbench/study/simulated_machine.py
q 's/"lane=eager"/"backend=eager"/' workbench/study/report.py
q 's/"busy": (tally|counters)/"utilization": $1/; s/"moves": /"plans": /; s/"sequences_most"/"sequences_max"/' workbench/study/simulated.py
q 's/each\[\x27busy\x27\]/each[\x27utilization\x27]/g; s/each\["busy"\]/each["utilization"]/g; s/busy: \{busy\}/utilization: {busy}/; s/\[\x27sequences_most\x27\]/[\x27sequences_max\x27]/' workbench/cli/simulate.py
q 's/tally\["moves"\]/tally["plans"]/' tests/fleet/scenes.py
q 's/another one may not stand for it; only temperature 0 can be kept by exact request/it must not be reused; only temperature 0 is cached by exact request/' workbench/economics/exact_cache.py
q 's/Request\("kept"/Request("measured"/' workbench/study/quality_costs.py
# -- a field of a dataclass reached by name in another dictionary: `life` of the daily plans
q 's/"plan": plan\.name, "life": /"plan": plan.name, "ttl": /' workbench/economics/cache_figures.py
q 's/row\["life"\]/row["ttl"]/' experiments/claims/prices.py
# -- packaging: peers leave the library, the tables of prices stay
q 's/include = \["workbench\*", "compiled_kernels\*", "experiments\*"\]/include = ["workbench*", "compiled_kernels*", "experiments*", "benchmarks*"]/; s/include = \["workbench", "compiled_kernels", "experiments", "tools", "tests"\]/include = ["workbench", "compiled_kernels", "experiments", "benchmarks", "tools", "tests"]/' pyproject.toml
