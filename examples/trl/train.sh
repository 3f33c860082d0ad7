#!/usr/bin/env bash
# The workload of the APRIL paper in TRL with april: one GPU trains, the others generate; see README.md.
#
#   MODEL      qwen3-4b | r1-distill-1.5b
#   ALGORITHM  grpo | dapo | gspo
#   DATA       dapo-math-17k | deepscaler | deepmath-103k, or a file of JSON lines
#   PLATFORM   nvidia | amd
#   SERVER     vllm | sglang | none (the trainer's own model generates, on one GPU)
#
# MODEL_DIR says where models are (those that are not there come from the Hugging Face hub), WEIGHTS_DIR where new weights
# go: a directory that the servers can read. DRY_RUN=1 prints the commands. What stands behind the script's name is given
# to train.py.
set -euo pipefail

MODEL=${MODEL:-qwen3-4b}
ALGORITHM=${ALGORITHM:-grpo}
DATA=${DATA:-dapo-math-17k}
PLATFORM=${PLATFORM:-nvidia}
SERVER=${SERVER:-vllm}
NUM_GPUS=${NUM_GPUS:-8}
MODEL_DIR=${MODEL_DIR:-/root/models}
WEIGHTS_DIR=${WEIGHTS_DIR:-/dev/shm/april-weights}
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

wrong() {
    echo "train.sh: $1" >&2
    exit 2
}

case $MODEL in
    qwen3-4b) OWNER=Qwen NAME=Qwen3-4B ;;
    r1-distill-1.5b) OWNER=deepseek-ai NAME=DeepSeek-R1-Distill-Qwen-1.5B ;;
    *) wrong "MODEL=$MODEL must be qwen3-4b or r1-distill-1.5b" ;;
esac
[ -e "$MODEL_DIR/$NAME" ] && PATH_OR_NAME=$MODEL_DIR/$NAME || PATH_OR_NAME=$OWNER/$NAME
case $ALGORITHM in grpo | dapo | gspo) ;; *) wrong "ALGORITHM=$ALGORITHM must be grpo, dapo or gspo" ;; esac
case $PLATFORM in
    nvidia) DEVICES=CUDA_VISIBLE_DEVICES ;;
    amd) DEVICES=HIP_VISIBLE_DEVICES ;;
    *) wrong "PLATFORM=$PLATFORM must be nvidia or amd" ;;
esac
case $SERVER in
    vllm)
        # docs/servers.md says what each of them is for
        SERVE=(env VLLM_SERVER_DEV_MODE=1 VLLM_HTTP_TIMEOUT_KEEP_ALIVE=3600 vllm serve "$PATH_OR_NAME" --max-model-len 18432)
        SERVE+=(--logprobs-mode processed_logprobs --enable-scale-out --enable-prefix-caching)
        ;;
    sglang)
        SERVE=(env SGLANG_TIMEOUT_KEEP_ALIVE=3600 python3 -m sglang.launch_server --model-path "$PATH_OR_NAME" --context-length 18432)
        SERVE+=(--incremental-streaming-output)
        ;;
    none) NUM_GPUS=1 ;;
    *) wrong "SERVER=$SERVER must be vllm, sglang or none" ;;
esac
if [ "$SERVER" != none ] && [ "$NUM_GPUS" -lt 2 ]; then
    wrong "NUM_GPUS=$NUM_GPUS: one trains, so at least 2 are needed to serve as well; or set SERVER=none"
fi

TRAIN=(python3 "$HERE/train.py" --model "$MODEL" --path "$PATH_OR_NAME" --algorithm "$ALGORITHM" --data "$DATA")
URLS=()
for ((GPU = 1; GPU < NUM_GPUS; GPU++)); do URLS+=("http://127.0.0.1:$((8000 + GPU))"); done
if [ "${#URLS[@]}" -gt 0 ]; then
    TRAIN+=(--kind "$SERVER" --urls "${URLS[@]}" --weights-dir "$WEIGHTS_DIR")
fi
TRAIN+=("$@")

PIDS=()
for ((GPU = 1; GPU < NUM_GPUS; GPU++)); do
    COMMAND=(env "$DEVICES=$GPU" "${SERVE[@]}" --host 127.0.0.1 --port "$((8000 + GPU))")
    if [ -n "${DRY_RUN:-}" ]; then
        printf '%s\n' "${COMMAND[*]}"
    else
        "${COMMAND[@]}" &
        PIDS+=($!)
    fi
done
if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "env $DEVICES=0 ${TRAIN[*]}"
    exit
fi
[ "${#PIDS[@]}" -gt 0 ] && trap 'kill "${PIDS[@]}" 2>/dev/null || true' EXIT
for ((I = 0; I < ${#URLS[@]}; I++)); do
    until curl --silent --fail --output /dev/null "${URLS[I]}/health"; do
        kill -0 "${PIDS[I]}" 2>/dev/null || wrong "the server for ${URLS[I]} has ended; its output says why"
        sleep 2
    done
done
env "$DEVICES=0" "${TRAIN[@]}"
