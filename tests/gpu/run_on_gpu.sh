#!/bin/sh
# What the wheels of this tree do on a machine with a CUDA device.
#
#   tests/gpu/run_on_gpu.sh WHEELS [pytest arguments]
#
# WHEELS is a folder with the wheels of opgraft and its plugins, and of whatever they need that this
# machine lacks. They are installed into a folder of their own; torch and Triton are the machine's.
set -eu

wheels=$1
shift
site=$(mktemp -d)
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
export PYTHONPATH="$site" PYTHONUNBUFFERED=1

nvidia-smi --list-gpus
python3 -c 'import torch, triton; print("torch", torch.__version__, "triton", triton.__version__)'
python3 -m opgraft list
arch=$(python3 -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
for dtype in int32 int64; do
    python3 -m opgraft explain attention.clamp_position --device cuda --arch "$arch" --dtype "$dtype"
    for backend in cuda/jit cuda/triton native; do
        python3 -m opgraft run attention.clamp_position seq_lens=-1,0,1,2,4096 \
            --device cuda --dtype "$dtype" --backend "$backend"
    done
done
python3 -m pytest tests/gpu --gpu -q -p no:cacheprovider "$@"
