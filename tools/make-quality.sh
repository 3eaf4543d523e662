#!/bin/sh
# Makes the tables of methods and the picture of docs/quality.md: fetches the model and the text,
# builds kvarn-eval, runs all methods and draws the reports. Hours on two cores; a second call goes
# on where the first one stopped.
#
#   tools/make-quality.sh [TEXT...]     other text files beside the one that is fetched
#
# A TEXT called wikitext2_test.txt (the test split of WikiText-2) gives the page's tables of it.
# Results: build/quality/NAME/report.json, report.csv, table.md, quality.svg, NAME that of the text;
# build/quality/texts.md, the texts side by side.
# After a change of an encoder, delete the results that are of the old one.
# $plan is unquoted below: it is split into arguments on purpose.
# shellcheck disable=SC2086
set -eu
start=$PWD
cd "$(dirname "$0")/.."

say() { printf 'make-quality: %s\n' "$*"; }
fail() {
  say "error: $*" >&2
  exit 1
}

# What would only fail after hours is looked at first.
names=" opticks "
for text in "$@"; do
  shift
  case $text in
    -*) fail "unknown option '$text'; arguments are text files" ;;
    /*) ;;
    *) text=$start/$text ;;  # of the caller's folder
  esac
  { [ -f "$text" ] && [ -r "$text" ]; } || fail "$text is no file that can be read"
  name=$(basename "$text" .txt)
  case $names in
    *" $name "*) fail "$text: results of a text called $name are in build/quality/$name; rename it" ;;
  esac
  names="$names$name "
  set -- "$@" "$text"
done

# The first Python in the search path may not be the one that has matplotlib.
for python in python3 /usr/bin/python3 none; do
  ! "$python" -c 'import matplotlib' 2>/dev/null || break
done
[ "$python" != none ] || fail "no python3 has matplotlib; tools/install-packages.sh installs it"

model=build/models/SmolLM2-135M-Instruct.Q4_1.gguf
tools/fetch-model.sh
tools/fetch-text.sh
cmake --preset demo
cmake --build --preset demo --target kvarn-eval

# More threads than that have too little to do in a model of this size.
threads=$(nproc)
[ "$threads" -le 16 ] || threads=16

for text in "$PWD/build/texts/opticks.txt" "$@"; do
  name=$(basename "$text" .txt)
  out=build/quality/$name
  case $name in
    # Line retrieval has texts of its own: once is enough. With more lines the model itself, with an
    # exact cache, finds 2 to 5 of 20 only.
    opticks) plan="--windows 5 --retrieval --retrieval-lines 20,40,80,160
      --static kivi,rotation_kivi,turbo,paper_k2v2,tuned_k2v2,query_aware_k2v2" ;;
    wikitext2_test) plan="--offsets 0,100000,400000,600000,800000" ;;
    *) plan="--windows 5" ;;
  esac
  build/demo/tools/eval/kvarn-eval --model "$model" --text "$text" --out "$out" \
    --methods all --threads "$threads" $plan
  "$python" tools/plot_quality.py "$out/report.json" >"$out/table.md"
  "$python" tools/plot_quality.py "$out/report.json" "$out/quality.svg"
  cat "$out/table.md"
  say "results: $out/table.md $out/quality.svg $out/report.json $out/report.csv"
done

[ "$#" -gt 0 ] || exit 0
for text in "$@"; do  # in its place its report
  shift
  set -- "$@" "build/quality/$(basename "$text" .txt)/report.json"
done
"$python" tools/plot_quality.py build/quality/opticks/report.json "$@" >build/quality/texts.md
say "all texts side by side: build/quality/texts.md"
