#!/usr/bin/env bash
# The workload of the APRIL paper in OpenRLHF, with april or without; see README.md.
#
#   MODEL      qwen3-4b | r1-distill-1.5b
#   ALGORITHM  grpo | dapo | gspo
#   DATA       dapo-math-17k | deepscaler | deepmath-103k
#   PLATFORM   nvidia | amd
#   MODE       sync (all GPUs colocated) | async (half of them generate)
#   ROLLOUT    april | continuous (april, whose engines go on while it trains; MODE=async) | own (OpenRLHF alone)
#
# MODEL_DIR, DATA_DIR and SAVE_DIR say where things are; models and data sets that are not there come from the Hugging
# Face hub. DRY_RUN=1 prints the command.
set -euo pipefail

MODEL=${MODEL:-qwen3-4b}
ALGORITHM=${ALGORITHM:-grpo}
DATA=${DATA:-dapo-math-17k}
PLATFORM=${PLATFORM:-nvidia}
MODE=${MODE:-sync}
ROLLOUT=${ROLLOUT:-april}
NUM_GPUS=${NUM_GPUS:-8}
MODEL_DIR=${MODEL_DIR:-/root/models}
DATA_DIR=${DATA_DIR:-/root/data}
SAVE_DIR=${SAVE_DIR:-/root/checkpoints}
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

wrong() {
    echo "train.sh: $1" >&2
    exit 2
}

# ---------------------------------------------------------------- model and data

case $MODEL in
    qwen3-4b) OWNER=Qwen NAME=Qwen3-4B ;;
    r1-distill-1.5b) OWNER=deepseek-ai NAME=DeepSeek-R1-Distill-Qwen-1.5B ;;
    *) wrong "MODEL=$MODEL must be qwen3-4b or r1-distill-1.5b" ;;
esac
case $DATA in
    dapo-math-17k) SET=zhuzilin/dapo-math-17k QUESTION=prompt ANSWER=label ;;
    deepscaler) SET=agentica-org/DeepScaleR-Preview-Dataset QUESTION=problem ANSWER=answer ;;
    deepmath-103k) SET=zwhe99/DeepMath-103K QUESTION=question ANSWER=final_answer ;;
    *) wrong "DATA=$DATA must be dapo-math-17k, deepscaler or deepmath-103k" ;;
esac
[ -e "$MODEL_DIR/$NAME" ] && NAME_OR_PATH=$MODEL_DIR/$NAME || NAME_OR_PATH=$OWNER/$NAME
[ -e "$DATA_DIR/$DATA.jsonl" ] && SET=$DATA_DIR/$DATA.jsonl
RUN=$SAVE_DIR/$NAME-$DATA-$ALGORITHM-$MODE-$ROLLOUT

case $ROLLOUT in
    april | continuous)
        COMMAND=(python3 -m april.adapters.openrlhf)
        COMMAND+=(--april.config "$HERE/april.yaml")
        [ "$ROLLOUT" = april ] || COMMAND+=(--april.generation continuous --april.refill sample)
        ;;
    own) COMMAND=(python3 -m openrlhf.cli.train_ppo_ray) ;;
    *) wrong "ROLLOUT=$ROLLOUT must be april, continuous or own" ;;
esac
COMMAND+=(
    --actor.model_name_or_path "$NAME_OR_PATH" --data.prompt_dataset "$SET" --data.input_key "$QUESTION"
    --data.label_key "$ANSWER" --data.apply_chat_template --reward.remote_url "$HERE/reward.py"
    --ckpt.path "$RUN/steps" --ckpt.output_dir "$RUN/model" --ckpt.save_steps 20 --ckpt.load_enable
)

# ---------------------------------------------------------------- rollout and algorithm

COMMAND+=(
    --rollout.batch_size 32 --rollout.n_samples_per_prompt 8 --rollout.max_new_tokens 16384 --data.max_len 18432
    --rollout.temperature 0.8 --rollout.micro_batch_size 1
    --train.batch_size 256 --train.micro_batch_size 1 --train.num_episodes 1
    --algo.advantage.estimator group_norm --actor.eps_clip_low_high 0.2 0.28 --algo.kl.init_coef 0
    --algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip
    --algo.advantage.is_correction_threshold 0 2
    --actor.adam.lr 1e-6 --actor.adam.betas 0.9 0.98 --actor.adam.weight_decay 0.1
    --actor.lr_scheduler constant --actor.lr_warmup_ratio 0
)
case $ALGORITHM in
    grpo) ;;
    dapo) COMMAND+=(--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1) ;;
    gspo) COMMAND+=(--actor.policy_loss_type gspo) ;;
    *) wrong "ALGORITHM=$ALGORITHM must be grpo, dapo or gspo" ;;
esac
EVALUATION=${EVALUATION:-$DATA_DIR/aime-2024.jsonl}
if [ -e "$EVALUATION" ]; then
    COMMAND+=(--eval.dataset "$EVALUATION" --eval.steps 10 --eval.n_samples_per_prompt 16 --eval.temperature 0.8)
fi

# ---------------------------------------------------------------- GPUs

COMMAND+=(
    --ds.zero_stage 3 --ds.param_dtype bf16 --actor.gradient_checkpointing_enable --ds.packing_samples
    --train.dynamic_batch_enable --train.max_tokens_per_gpu 18432 --rollout.max_tokens_per_gpu 36864
    --actor.num_nodes 1 --vllm.tensor_parallel_size 2 --vllm.sync_backend nccl
)
case $MODE in
    sync)
        COMMAND+=(--train.colocate_all --vllm.enable_sleep --ds.enable_sleep --vllm.gpu_memory_utilization 0.6)
        COMMAND+=(--actor.num_gpus_per_node "$NUM_GPUS" --vllm.num_engines "$((NUM_GPUS / 2))")
        ;;
    async)
        COMMAND+=(--train.async_enable --vllm.gpu_memory_utilization 0.9)
        COMMAND+=(--actor.num_gpus_per_node "$((NUM_GPUS / 2))" --vllm.num_engines "$((NUM_GPUS / 4))")
        ;;
    *) wrong "MODE=$MODE must be sync or async" ;;
esac
case $PLATFORM in
    nvidia) ;;
    amd)
        export RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES=1 RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1
        HIP_VISIBLE_DEVICES=${HIP_VISIBLE_DEVICES:-$(seq -s, 0 $((NUM_GPUS - 1)))}
        export HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES=$HIP_VISIBLE_DEVICES
        ;;
    *) wrong "PLATFORM=$PLATFORM must be nvidia or amd" ;;
esac

if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${COMMAND[*]}"
    exit
fi
ADDRESS=${MASTER_ADDR:-127.0.0.1}
ray start --head --node-ip-address "$ADDRESS" --num-gpus "$NUM_GPUS" --disable-usage-stats
ray job submit --address="http://$ADDRESS:8265" -- "${COMMAND[@]}"
