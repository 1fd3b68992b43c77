#!/bin/sh
# Run gpu.py where the project is not installed, such as on a machine that is lent for minutes:
#
#     sh tests/bench/gpu_bare.sh --out FOLDER [--budget 560] [--parts smoke,tests] [--commit COMMIT]
#
# Needs torch for CUDA, and the packages that workers import; wheels in the folder .whl are installed for this run alone. The
# parts serve-... need Ray and the packages of the servers too. Folders of PYTHONPATH are searched last.
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
site=$(mktemp -d)
mkdir -p "$site/tramontane" "$site/tramontane-0.dist-info"
for room in proto workers router cluster; do ln -s "$root/$room" "$site/tramontane/$room"; done
ln -s "$root/router/client" "$site/tramontane/client" # as pyproject.toml names them
ln -s "$root/cluster/llm" "$site/tramontane/llm"
# The version, which servers ask for, as an installed package has it.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
printf 'Metadata-Version: 2.1\nName: tramontane\nVersion: %s\n' "$version" >"$site/tramontane-0.dist-info/METADATA"
if [ -d "$root/.whl" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$root"/.whl/*.whl
fi
export PYTHONPATH="$site:$root/tests/support:$root/tests/bench${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
export TRITON_CACHE_DIR="$site/triton" TORCHINDUCTOR_CACHE_DIR="$site/inductor"
exec python3 "$root/tests/bench/gpu.py" "$@"
