# Test and time hookdrop on a GPU, within 8 minutes: `make gpu`. The page has what the programs print.
set -o pipefail
python=$1
export PYTHONPATH=.:benchmarks${PYTHONPATH:+:$PYTHONPATH} NO_COLOR=1
device=$("$python" -c 'import re, torch; print(re.sub("[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-"))') || exit 1
out=benchmarks/results/$device
mkdir -p "$out"
failed=0

step() {
    echo "\$ python $*"
    "$python" "$@" || failed=1
}

{
    step -m pytest -q -n 8 -W default --disable-warnings --tb=short tests/integration/gpu \
        tests/unit/accel/test_triton_dropblock.py tests/unit/kernels/test_no_synchronization.py tests/benchmarks/test_launches.py
    step benchmarks/launches.py
    step benchmarks/speed.py --device cuda --part memory main small --rounds 15 --json "$out/results.json"
    step benchmarks/train_step.py --device cuda --part resnet compiled --batch 128 --rounds 15 --json "$out/train_step.json"
    step benchmarks/train_step.py --device cuda --part skip --rounds 15 --json "$out/skip_step.json"
    exit $failed
} 2>&1 | tee "$out/page.txt"
