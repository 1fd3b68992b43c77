#!/bin/sh
# Run gpu.py where the project is not installed, such as on a machine that is lent for minutes:
#
#     sh tests/bench/gpu_bare.sh --out FOLDER [--budget 560] [--parts smoke,tests] [--commit COMMIT]
#
# Needs torch for CUDA, and the packages that workers import; wheels in the folder .whl are installed for this run alone.
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
site=$(mktemp -d)
mkdir -p "$site/tramontane"
for room in proto workers router cluster; do ln -s "$root/$room" "$site/tramontane/$room"; done
if [ -d "$root/.whl" ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site" "$root"/.whl/*.whl
fi
export PYTHONPATH="$site:$root/tests/support:$root/tests/bench" PYTHONDONTWRITEBYTECODE=1
export TRITON_CACHE_DIR="$site/triton" TORCHINDUCTOR_CACHE_DIR="$site/inductor"
exec python3 "$root/tests/bench/gpu.py" "$@"
