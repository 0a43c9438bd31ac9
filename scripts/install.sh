#!/usr/bin/env bash
# Make a virtual environment and install Fivefold into it with pip.
set -euo pipefail
python=${PYTHON:-python3}
venv=${VENV:-.venv}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case "$version" in
3.11 | 3.12) ;;
*)
    echo "Fivefold needs Python 3.11 or 3.12, but $python is $version. Name another: make install PYTHON=python3.11" >&2
    exit 2
    ;;
esac

"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    # One exact version: pip then takes a local or a CPU-only build of it where pip's configuration offers one.
    pip install --quiet "${TORCH:-torch==2.13.0}"
fi
# The release that the measurements are from; pip alone would take the newest one that this Python can have.
pip install --quiet "${MEGATRON_CORE:-megatron-core==0.16.1}" --editable ".[${EXTRAS:-dev,gguf,report}]"
echo "Installed Fivefold $("$venv/bin/fivefold" --version | cut -d' ' -f2) into $venv: source $venv/bin/activate"
