#!/bin/sh
# Makes every table and picture of docs/quality.md: fetches the model and the text, builds
# kvarn-eval, runs all methods and draws the reports. Hours on two cores; a second call goes on
# where the first one stopped.
#
#   tools/make-quality.sh [TEXT...]     other text files beside the one that is fetched
#
# Results: build/quality/NAME/report.json, report.csv, table.md, quality.svg, NAME that of the text.
set -eu
start=$PWD
cd "$(dirname "$0")/.."

model=build/models/SmolLM2-135M-Instruct.Q4_1.gguf
tools/fetch-model.sh
tools/fetch-text.sh
cmake --preset demo
cmake --build --preset demo --target kvarn-eval

# The first Python in the search path may not be the one that has matplotlib.
python=python3
"$python" -c 'import matplotlib' 2>/dev/null || python=/usr/bin/python3

for text in "$PWD/build/texts/opticks.txt" "$@"; do
  case $text in
    /*) ;;
    *) text=$start/$text ;;  # of the caller's folder
  esac
  name=$(basename "$text" .txt)
  out=build/quality/$name
  # Line retrieval has texts of its own: once is enough. With more lines the model itself, with an
  # exact cache, finds 2 to 5 of 20 only.
  extra=
  [ "$name" != opticks ] || extra="--retrieval --retrieval-lines 20,40,80,160"
  build/demo/tools/eval/kvarn-eval --model "$model" --text "$text" --out "$out" \
    --methods all --windows 5 --static $extra
  "$python" tools/plot_quality.py "$out/report.json" >"$out/table.md"
  "$python" tools/plot_quality.py "$out/report.json" "$out/quality.svg"
  cat "$out/table.md"
done
