#!/bin/bash
# Strings that no rule of w-records.txt can say. Run in the root of the checkout AFTER all renames, words and keys of all
# writers and BEFORE the moves (it names today's paths). Every substitution may be run twice.
set -e
q() { perl -pi -e "$1" "${@:2}"; }   # q EXPRESSION FILES
# -- modules and files named in strings
q 's/PackageLoader\("workbench\.(records|runs)"/PackageLoader("workbench.reports"/' workbench/records/report_html.py
q 's/workbench\.records/workbench.runs/g' workbench/records/__init__.py
q 's/"places", "rows", "settings_text", "/"locations", "rows", "/' workbench/records/index.py      # files whose text the index's key has
q 's/"records\/\*\.j2"/"reports\/*.j2"/' pyproject.toml
q 's/"workbench\.records\.places\.read_text"/"workbench.runs.locations.read_text"/; s/"workbench\.records\.rows\.read_text"/"workbench.runs.rows.read_text"/' tests/records/test_index.py
q 's/workbench\.records\.Comparison/workbench.runs.Comparison/; s/`workbench\.records\.compare`/`workbench.runs.compare`/' workbench/widgets/compare/view.py tests/widgets/test_compare.py
q 's/`workbench\/records\/`, `workbench\/sweep\/`, `workbench\/ledger\/`/`workbench\/runs\/`, `workbench\/reports\/`, `workbench\/sweep\/`, `workbench\/claims\/`/; s/`workbench\/study\/experiment\.py`/`workbench\/experiment\/experiment.py`/' notebooks/09_experiments.py
# -- the default measures of `compare`: a run's summary has goodput: {share} (flattened goodput_share), a variant's row slo_attainment
q 's/"slo_attainment", "kv_bytes_peak"/"goodput_share", "slo_attainment", "kv_bytes_peak"/ unless /"goodput_share"/' workbench/records/measures.py
# -- labels and messages
q 's/"kept promise"/"SLO attainment"/' workbench/records/sweep_sheet.py
q 's/taken on a busy machine: /measured under contention: /' workbench/records/comparison.py
q 's/"busy while measured, do not trust its times: /"measured under contention, do not trust its times: /; s/f"busy while measured, do not trust its times: /f"measured under contention, do not trust its times: /; s/also times taken on a busy machine/also times measured under contention/' workbench/cli/records.py
q 's/help="promised seconds/help="SLO: seconds/' workbench/cli/simulate.py
q 's/ must stand in `(gives|examples)`, with evidence, or in `(never|impossible)`, with the reason/ must be in `examples`, with evidence, or in `impossible`, with the reason/; s/`gives` and `never` may name/`examples` and `impossible` may name/; s/ stands in \{/ is in {/; s/never \{outcome!r\}, and does not say why/{outcome!r} is impossible without a reason/' workbench/ledger/registry.py
q 's/must stand in/must be in/g; s/in `(gives|examples)`, with evidence, or in `(never|impossible)`/in `examples`, with evidence, or in `impossible`/g; s/and does not say why/is impossible without a reason/g' tests/ledger/*.py
q 's/ stands twice/ is used twice/' workbench/records/self_contained.py tests/records/test_report.py
q 's/points shapes do not tell the time; it is told once one has run/points shapes give no time; it is estimated once one has run/' workbench/sweep/plan.py tests/sweep/*.py
q 's/"told": str\(each\)/"text": str(each)/' workbench/records/reproduce.py
q 's/each\["told"\] for each in result\["tokens"\]/each["text"] for each in result["tokens"]/' tests/test_cli.py
q 's/"same_words"/"same_reasons"/g; s/down to the words of every decision/down to the reason of every decision/; s/some decisions in other words/some decisions with other reasons/' workbench/records/reproduce.py tests/records/test_reproduce.py tests/test_cli.py
# -- names of laws, wherever they stand (gives_up of eviction policies, tests, README)
L=$(grep -rlE "undisturbed|set back \(offload|nobody starves among|no set-back loop|pages come back|nobody begins|somebody can get on|nobody is named twice|whatever stands beside it|nobody got further|is set back|set-backs|it wishes|did not come back" --include=*.py --include=*.md workbench/testing workbench/cache tests/testing tests/engine tests/sampling tests/experiments README.md docs 2>/dev/null || true)
[ -z "$L" ] || q 's/(set back|preempted) = undisturbed/preempted = uninterrupted/g; s/(set back|preempted) \(offload/preempted (offload/g; s/other rows than undisturbed/other logits than uninterrupted/g; s/nobody starves among/no request starves among/g; s/a step\x27s tokens are kept to, nobody is named twice, and only who is there/a step keeps its token budget, names no request twice, and only present ones/g; s/pages conserved: nobody begins in pages that are not there/pages conserved: no request starts without free pages/g; s/no plan when nothing fits, and one whenever somebody can get on/no request starts where none fits, and some request advances where one can/g; s/no set-back loop: between two of one sequence somebody gets further/no preemption loop: between two of one sequence some request advances further/g; s/all pages come back/all pages are freed/g; s/pages did not come back/pages were not freed/g; s/whatever stands beside it/whatever its neighbours/g; s/nobody got further in/no request advanced in/g; s/nobody got further/no request advanced/g; s/is set back \{between\}/is preempted {between}/g; s/was set back \{/was preempted {/g; s/ set-backs/ preemptions/g; s/asked twice about one state it wishes/called twice with one state it decides/g' $L
