#!/bin/bash
# Strings and untyped uses that no rule of w-widgets.txt can say. Run in the root of the checkout AFTER all renames, words and
# keys of all writers and BEFORE the moves (it names today's paths). Every substitution may be run twice.
set -e
q() { perl -pi -e "$1" "${@:2}"; }   # q EXPRESSION FILES
W=workbench/widgets; T=tests/widgets
ALL="$(find $W $T -name '*.py') experiments/lab_bars.py $(ls notebooks/*.py)"
# -- names fetched through workbench.widgets.__getattr__: modules of _HOMES, members of RunnerThread, throttle of a widget
q 's/"live",$/"runner_thread",/; s/"roofline\.values"/"roofline.data"/' $W/__init__.py
q 's/\bRunnerThread\.of\b/RunnerThread.attach/g; s/(RunnerThread\.attach\(\w+\)|\b_?live)\.ask\(/$1.submit(/g; s/RunnerThread\.ask\b/RunnerThread.submit/g; s/(RunnerThread\.attach\(\w+\))\.elsewhere\(/$1.is_other_thread(/g' $ALL workbench/engine/runner.py
q 's/\.pulse\b(?! import)/.throttle/g; s/hasattr\(self, "pulse"\)/hasattr(self, "throttle")/; s/^(from workbench\.widgets)\.throttle\b/$1.pulse/' $ALL
q 's/`live\.py` owns/`runner_thread.py` owns/' README.md
# -- kit: the module is svg.py after the moves; its functions, where a module fetched through the package was not followed
q 's/\bkit\b/svg/g unless /conformity kit|testing/' $(find $W -name '*.py') $T/test_heat_map.py $T/test_view.py $T/test_exported_text.py
q 's/\bsvg\.svg\(/svg.document(/g; s/\bsvg\.num\(/svg.format_coordinate(/g; s/\bsvg\.shade\(/svg.cividis_colour(/g; s/\bsvg\.ink\(/svg.contrast_colour(/g; s/\bsvg\.attribute\(/svg.escape_attribute(/g; s/\bsvg\.SERIES\b/svg.SERIES_COLOURS/g; s/\bsvg\.STYLE\b/svg.BASE_STYLE/g; s/`svg\.svg`/`svg.document`/g' $(find $W -name '*.py') $T/test_heat_map.py $T/test_view.py $T/test_exported_text.py
q 's/^from workbench\.widgets\.svg\b/from workbench.widgets.kit/' $(find $W $T -name '*.py')
# -- members reached through Any
q 's/self\._(trials|exclusive)\.look\(/self._$1.notify(/; s/self\._(trials|exclusive)\.first\(/self._$1.is_first(/; s/self\._(trials|exclusive)\b/self._exclusive/g' $W/speculation/run.py
q 's/(live|_live)\.trials\b/$1.exclusive/g; s/\blive\.name\(/live.new_request_id(/g' $W/speculation/run.py $W/sampling/text.py $W/playground/playing.py
q 's/_trial\.both\.seen/_comparison.events.current/g; s/_trial\.both\b/_comparison.events/g; s/\._trial\b/._comparison/g; s/_run\.checks_of\(/_run.verifications_of(/g' $T/test_speculation_view.py
q 's/\.seen\(\)/.figures()/g' $T/test_sampling_explorer.py notebooks/05_sampling.py
q 's/\bplay\._go\b/play._run_button/g; s/\bplay\._halt\b/play._stop_button/g; s/\bplay\._again\b/play._reset_button/g; s/_runners\._kept\b/_runners._runners/g; s/type\(playing\)\.doing\b/type(playing).status/g; s/piece\.chance\b/piece.probability/g; s/piece\.others\b/piece.alternatives/g' $T/test_playground*.py
q 's/\bplayed\.ends\b/played.finish_reasons/g; s/\bplayed\.pieces\b/played.tokens_by_sample/g; s/\bplayed\.rest\b/played.trailing_text/g; s/\bplayed\.tokens\b/played.num_tokens/g; s/\bplayed\.first\b/played.first_token_time/g' $T/test_playground*.py experiments/lab_bars.py notebooks/*.py
q 's/\b_kept_bytes\(/_cached_bytes(/g; s/\.map\.told\b/.map.caption/g; s/\.source\.groups\(/.source.num_kv_heads(/g; s/\.reduced\(/.downsample(/g; s/workbench\.widgets\.attention\.view\.KEPT/workbench.widgets.attention.view.VIEW_CACHE_BYTES/' $T/test_attention_view*.py
q 's/\bview\.told\b/view.caption/g; s/setattr\(tiles, "SIDE", SIDE\)/setattr(tiles, "TILE_SIDE", SIDE)/' $T/test_heat_map.py
q 's/\.cuts\b/.tokens/g; s/\bcharacters_a_token\b/characters_per_token/g; s/\bbytes_a_token\b/bytes_per_token/g' $T/test_token_view.py
q 's/\.resting\b/.between_steps/g; s/\.alone\(/.num_exclusive(/g; s/\.shared\(/.num_shared(/g; s/\.idle\(/.num_idle(/g; s/\.free\((?=panel|0|1)/.num_free(/g; s/\bseen\.kept\[/seen.in_prefix_index[/g; s/\bpanel\.host\b/panel.on_cpu/g; s/\blog\.thinned\b/log.num_thinned/g; s/\blog\.numbers\b/log.owner_numbers/g' $T/test_page_map.py
# -- keywords of dataclasses.replace
q 's/replace\(groups\[-1\], told=told\)/replace(groups[-1], description=told)/; s/replace\(groups\[-1\], description=told\)/replace(groups[-1], description=description)/; s/\btold = ", "/description = ", "/' $W/kernels/fused.py
# -- shared with JavaScript and CSS
q 's/get\("told"\)/get("caption")/; s/\bwb-told\b/wb-caption/g; s/\btold\b/caption/g; s/change:told/change:caption/g' $W/attention/heat_map.js $W/attention/heat_map.css
q 's/\bsaid\b/status/g' $W/playground/copy_button.js
q 's/\btell\(null\)/showTip(null)/g; s/const tell = \(target/const showTip = (target/; s/\btell\(near/showTip(near/g; s/\btell\b/reportTyping/g; s/What has data-tip tells it to/An element with data-tip shows it to/; s/what has data-key$/an element with data-key/; s/is told what is new/gets the new part/' $W/picture.js
q 's/\.wb-pic \.told/.wb-pic .spelled/g; s/class="told"/class="spelled"/g' $W/speculation/picture.py
q 's/\.wb-tokens \.asked/.wb-tokens .prompt/g; s/class_="asked"/class_="prompt"/g' $W/tokens/text.py
q 's/class="asked"/class="prompt"/g; s/span\.asked/span.prompt/g; s/(?<=["\x27 ])\.asked\b/.prompt/g' $T/test_playground*.py $T/test_exported_text.py
# -- the local name `told`
t() { q "s/(?<![.\\w\"\x27])told(?![\\w\"\x27])/$1/g" "${@:2}"; }
t label $W/roofline/{picture,points}.py $W/attention/picture.py $W/compare/picture.py $W/pages/strip.py
t message $W/roofline/view.py $W/attention/{source,view}.py
q 's/self\.told\b/self.caption/g' $W/attention/heat_map.py
t header $W/attention/heat_map.py
t content $W/kit.py $W/kernels/picture.py
t description $W/kernels/fused.py
t on_record $W/kernels/view.py
t default_measures $W/compare/view.py
t text $W/timeline/tips.py $W/tokens/spelling.py
t caption $W/timeline/picture.py $W/pages/{cells,picture}.py $W/sampling/{picture,view}.py $W/memory/{picture,view}.py
t title_parts $W/pages/taking.py
t help_text $W/playground/picture.py $W/knobs/{leaves,kinds,schema,groups}.py
t errors $W/knobs/knobs.py
t on_change $W/pages/{log,view}.py
t token_text $W/speculation/picture.py
t figures $W/speculation/view.py
t represent $W/knobs/values.py
echo "strings of workbench/widgets: done"
