#!/usr/bin/env bash
# Makes the draft for SmolLM2-135M-Instruct from nothing: target, questions, answers, training. Every step goes on where
# it stopped: give the same command again.
# Usage: bash scripts/smollm2_draft.sh FOLDER GSM8K.jsonl   (GSM8K's training questions, a line {"prompt": ...} each)
set -euo pipefail
folder=${1:?FOLDER is missing} gsm8k=$(realpath "${2:?GSM8K.jsonl is missing}")
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh" "bench,train"
dflash() { "$PYTHON" -m sglang_dflash.cli "$@"; }
mkdir -p "$folder"
cd "$folder"
target=$(dflash fetch smollm2 | tail -n 1 | "$PYTHON" -c 'import json, sys; print(json.load(sys.stdin)["target"])')

answer() { # QUESTIONS ANSWERS [FLAGS]: greedy answers of at most 256 tokens
    dflash regenerate "$@" --target "$target" --max-new-tokens 256 --concurrency 64 \
        --server-args "--dtype bfloat16 --max-total-tokens 65536 --max-running-requests 64"
}

# 1,300 questions of GSM8K as they are, and 240 with the instruction that benchmarks add.
"$PYTHON" - "$gsm8k" <<'EOF'
import json, random, sys
rows = [json.loads(line)["prompt"] for line in open(sys.argv[1])]
random.Random(0).shuffle(rows)
boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
for name, some, more in (("gsm8k", rows[:1300], ""), ("boxed", rows[1300:1540], boxed)):
    with open(f"{name}.jsonl", "w") as file:
        file.writelines(json.dumps({"prompt": row + more}) + "\n" for row in some)
EOF
answer own.jsonl own-answers.jsonl --synthesize 660 --seed 1
answer code.jsonl code-answers.jsonl --synthesize 260 --seed 2 --opening "Write a Python function"
answer gsm8k.jsonl gsm8k-answers.jsonl
answer boxed.jsonl boxed-answers.jsonl

# The last 40 of each kind, 20 of the boxed ones, are never learned.
mkdir -p learned held-out
for kind in own code gsm8k boxed; do
    count=40
    [ "$kind" = boxed ] && count=20
    head -n "-$count" "$kind-answers.jsonl" > "learned/$kind.jsonl"
    tail -n "$count" "$kind-answers.jsonl" > "held-out/$kind.jsonl"
done

resume=()
[ -d draft/checkpoints ] && resume=(--resume)
dflash train --target "$target" --output draft --cache features "${resume[@]}" \
    --data learned/own.jsonl --data learned/code.jsonl --data learned/gsm8k.jsonl --data learned/boxed.jsonl \
    --held-out-data held-out/own.jsonl --held-out-data held-out/code.jsonl \
    --held-out-data held-out/gsm8k.jsonl --held-out-data held-out/boxed.jsonl \
    --init target --layers 3 --num-taps 5 --block-size 8 --mask-token-id auto \
    --batch-size 2 --anchors 48 --loss-ids 4096 --precision bf16 --target-dtype bfloat16 \
    --learning-rate 2e-3 --max-length 512 --epochs 1000 --max-steps 7000 \
    --held-out-limit 12 --eval-every 1000 --save-every 500 --keep-checkpoints 1

# The card names the model, not a folder of this machine, and says where the data are from.
name=SmolLM2-135M-Instruct
sed -i "s#$target#HuggingFaceTB/$name#g; s/for target\$/for $name/; s/name: \"draft\"/name: \"smollm2-draft\"/" draft/README.md
cat >> draft/README.md <<'EOF'

## How it was made

`bash scripts/smollm2_draft.sh FOLDER GSM8K.jsonl`, in the repository of sglang-dflash. The target is the one that
`sglang-dflash fetch smollm2` makes of 4-bit weights. It wrote 660 questions itself (`own`, seed 1) and 260 that begin
with "Write a Python function" (`code`, seed 2); 1,300 are of GSM8K's training split (`gsm8k`), 240 more of it end with
the instruction to box the answer (`boxed`). All answers are the target's own, greedy, in bfloat16, of at most 256
tokens: 473,000 tokens. The last 40 conversations of each kind, 20 of `boxed`, were held out; tau was measured on 12.
EOF
