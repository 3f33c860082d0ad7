#!/usr/bin/env bash
# The workload of the APRIL paper in slime or miles, with april as the rollout function; see README.md.
#
#   MODEL      qwen3-4b | r1-distill-1.5b
#   ALGORITHM  grpo | dapo | gspo
#   PLATFORM   nvidia | amd
#   TRAINER    slime (Megatron) | miles (Megatron) | miles-fsdp
#   ROLLOUT    april | own (the trainer's own partial rollout) | plain (no over-sampling)
#   DATA       dapo-math-17k | deepscaler | deepmath-103k, or a file below DATA_DIR with INPUT_KEY and LABEL_KEY
#
# From the paper's scripts (github.com/RLsys-Foundation/APRIL, scripts/partial_rollout): 32 groups of 8, N' = 64, 16,384
# tokens at temperature 0.8, one step of 256 responses, the optimizer, clipping, parallelism and evaluation. Ours:
# --use-tis for tokens of older weights, --num-rollout, --save-interval, and what april.yaml says.
#
# TRAINER_DIR, MODEL_DIR, DATA_DIR, SAVE_DIR and MEGATRON_DIR say where things are. DRY_RUN=1 prints the command.
set -euo pipefail

MODEL=${MODEL:-qwen3-4b}
ALGORITHM=${ALGORITHM:-grpo}
PLATFORM=${PLATFORM:-nvidia}
TRAINER=${TRAINER:-slime}
ROLLOUT=${ROLLOUT:-april}
DATA=${DATA:-dapo-math-17k}
NUM_GPUS=${NUM_GPUS:-8}
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

wrong() {
    echo "train.sh: $1" >&2
    exit 2
}

FRAMEWORK=${TRAINER%-fsdp}
case $TRAINER in slime | miles | miles-fsdp) ;; *) wrong "TRAINER=$TRAINER must be slime, miles or miles-fsdp" ;; esac
TRAINER_DIR=${TRAINER_DIR:-/root/$FRAMEWORK}
MODEL_DIR=${MODEL_DIR:-/root}
DATA_DIR=${DATA_DIR:-/root}
SAVE_DIR=${SAVE_DIR:-/root/checkpoints}

# ---------------------------------------------------------------- model

case $MODEL in
    qwen3-4b) NAME=Qwen3-4B SHAPE=qwen3-4B ;;
    r1-distill-1.5b) NAME=DeepSeek-R1-Distill-Qwen-1.5B SHAPE=qwen2.5-1.5B ;;
    *) wrong "MODEL=$MODEL must be qwen3-4b or r1-distill-1.5b" ;;
esac
RUN=$SAVE_DIR/$NAME-$ALGORITHM-$(basename "${DATA%.*}")-$TRAINER-$ROLLOUT
COMMAND=(python3 train.py --hf-checkpoint "$MODEL_DIR/$NAME" --load "$RUN" --save "$RUN" --save-interval 20)

if [ "$TRAINER" = miles-fsdp ]; then
    COMMAND+=(--train-backend fsdp --ref-load "$MODEL_DIR/$NAME" --gradient-checkpointing)
else
    MODEL_ARGS=()
    if [ -f "$TRAINER_DIR/scripts/models/$SHAPE.sh" ]; then
        # shellcheck disable=SC1090
        source "$TRAINER_DIR/scripts/models/$SHAPE.sh"
    elif [ -f "$TRAINER_DIR/scripts/models/$SHAPE.py" ]; then
        LINE=$(cd "$TRAINER_DIR" && python3 miles/utils/external_utils/model_args_utils.py "$SHAPE")
        read -ra MODEL_ARGS <<<"$LINE"
    elif [ -z "${DRY_RUN:-}" ]; then
        wrong "there is no $TRAINER_DIR/scripts/models/$SHAPE; set TRAINER_DIR to the source tree of $FRAMEWORK"
    fi
    COMMAND+=("${MODEL_ARGS[@]}" --ref-load "$MODEL_DIR/${NAME}_torch_dist")
    # Qwen2.5-1.5B, whose shape this is, ties its embeddings
    [ "$MODEL" = r1-distill-1.5b ] && COMMAND+=(--untie-embeddings-and-output-weights)
    COMMAND+=(
        --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1 --context-parallel-size 1
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
        --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32
        --attention-softmax-in-fp32 --attention-backend flash
    )
fi

# ---------------------------------------------------------------- data, rollout, algorithm

# the data sets as published, of columns of their own names; README.md says how the last two become one file each
case $DATA in
    dapo-math-17k) FILE=dapo-math-17k/dapo-math-17k.jsonl INPUT=prompt LABEL=label ;;
    deepscaler) FILE=deepscaler/deepscaler.parquet INPUT=problem LABEL=answer ;;
    deepmath-103k) FILE=deepmath-103k/deepmath-103k.parquet INPUT=question LABEL=final_answer ;;
    *.jsonl | *.parquet) FILE=$DATA INPUT=prompt LABEL=label ;;
    *) wrong "DATA=$DATA must be dapo-math-17k, deepscaler, deepmath-103k, or a .jsonl or .parquet file" ;;
esac
COMMAND+=(
    --prompt-data "$DATA_DIR/$FILE" --input-key "${INPUT_KEY:-$INPUT}" --label-key "${LABEL_KEY:-$LABEL}"
    --apply-chat-template --rollout-shuffle
    --rm-type deepscaler --num-rollout "${NUM_ROLLOUT:-3000}" --balance-data
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 16384 --rollout-temperature 0.8
)
case $ROLLOUT in
    april)
        COMMAND+=(--rollout-function-path april.adapters.slime.generate_rollout --custom-config-path "$HERE/april.yaml")
        COMMAND+=(--partial-rollout --over-sampling-batch-size 64 --use-tis)
        ;;
    own) COMMAND+=(--partial-rollout --over-sampling-batch-size 64 --use-tis) ;;
    plain) ;;
    *) wrong "ROLLOUT=$ROLLOUT must be april, own or plain" ;;
esac
case $ALGORITHM in
    grpo | dapo) ESTIMATOR=grpo ;;
    gspo) ESTIMATOR=gspo ;;
    *) wrong "ALGORITHM=$ALGORITHM must be grpo, dapo or gspo" ;;
esac
FILTER=$FRAMEWORK.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
[ "$ALGORITHM" = dapo ] && COMMAND+=(--dynamic-sampling-filter-path "$FILTER")
COMMAND+=(
    --advantage-estimator "$ESTIMATOR" --use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl --entropy-coef 0.0
    --eps-clip 0.2 --eps-clip-high 0.28
    --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
    --use-dynamic-batch-size --max-tokens-per-gpu 9216
    --eval-interval 10 --eval-prompt-data aime "$DATA_DIR/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 16 --eval-max-response-len 16384 --eval-top-p 0.7
)

# ---------------------------------------------------------------- GPUs

COMMAND+=(
    --actor-num-nodes 1 --actor-num-gpus-per-node "$NUM_GPUS" --colocate
    --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.6
)
ENVIRONMENT='"CUDA_DEVICE_MAX_CONNECTIONS": "1", "SGLANG_TIMEOUT_KEEP_ALIVE": "3600"'
case $PLATFORM in
    nvidia) MEGATRON_DIR=${MEGATRON_DIR:-/root/Megatron-LM} ;;
    amd)
        MEGATRON_DIR=${MEGATRON_DIR:-/workspace/Megatron-LM}
        export RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES=1 RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1
        HIP_VISIBLE_DEVICES=${HIP_VISIBLE_DEVICES:-$(seq -s, 0 $((NUM_GPUS - 1)))}
        export HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES=$HIP_VISIBLE_DEVICES NCCL_NVLS_ENABLE=0
        # slime's ROCm image has no fused gradient accumulation, and its script for AMD offloads nothing
        [ "$TRAINER" = slime ] && COMMAND+=(--no-gradient-accumulation-fusion --no-offload-train --no-offload-rollout)
        ;;
    *) wrong "PLATFORM=$PLATFORM must be nvidia or amd" ;;
esac

if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${COMMAND[*]}"
    exit
fi
cd "$TRAINER_DIR"
export PYTHONUNBUFFERED=1
ADDRESS=${MASTER_ADDR:-127.0.0.1}
ray start --head --node-ip-address "$ADDRESS" --num-gpus "$NUM_GPUS" --disable-usage-stats
ray job submit --address="http://$ADDRESS:8265" --working-dir . \
    --runtime-env-json="{\"env_vars\": {\"PYTHONPATH\": \"$MEGATRON_DIR\", $ENVIRONMENT}}" -- "${COMMAND[@]}"
