#!/usr/bin/env bash
# The workload of the APRIL paper in verl 0.9, with april switched on; see README.md.
#
#   MODEL      qwen3-4b | r1-distill-1.5b
#   ALGORITHM  grpo | dapo | gspo
#   DATA       dapo-math-17k | deepscaler | deepmath-103k (a parquet file of that name in DATA_DIR)
#   PLATFORM   nvidia | amd
#   ENGINE     fsdp | megatron (trains)
#   SERVER     sglang | vllm (generates)
#   ROLLOUT    april | own (verl's colocate_async) | plain (verl's sync)
#
# From the paper's scripts, which are slime's (examples/slime/train.sh): 32 groups of 8, N' = 64, 16,384 tokens at
# temperature 0.8, one step per batch, the optimizer, clipping and evaluation. Ours: what only verl has (offloading,
# tokens per GPU), and the correction of tokens of older weights.
#
# MODEL_DIR, DATA_DIR and SAVE_DIR say where things are. DRY_RUN=1 prints the overrides, one per line. What stands behind
# the script's name is given to verl after them.
set -euo pipefail

MODEL=${MODEL:-qwen3-4b}
ALGORITHM=${ALGORITHM:-grpo}
DATA=${DATA:-dapo-math-17k}
PLATFORM=${PLATFORM:-nvidia}
ENGINE=${ENGINE:-fsdp}
SERVER=${SERVER:-sglang}
ROLLOUT=${ROLLOUT:-april}
NUM_GPUS=${NUM_GPUS:-8}
MODEL_DIR=${MODEL_DIR:-/root}
DATA_DIR=${DATA_DIR:-/root/data}
SAVE_DIR=${SAVE_DIR:-/root/checkpoints}
HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

wrong() {
    echo "train.sh: $1" >&2
    exit 2
}

case $MODEL in
    qwen3-4b) NAME=Qwen3-4B ;;
    r1-distill-1.5b) NAME=DeepSeek-R1-Distill-Qwen-1.5B ;;
    *) wrong "MODEL=$MODEL must be qwen3-4b or r1-distill-1.5b" ;;
esac
case $DATA in
    dapo-math-17k | deepscaler | deepmath-103k) ;;
    *) wrong "DATA=$DATA must be dapo-math-17k, deepscaler or deepmath-103k" ;;
esac
case $SERVER in sglang | vllm) ;; *) wrong "SERVER=$SERVER must be sglang or vllm" ;; esac

ACTOR=actor_rollout_ref.actor
ROLL=actor_rollout_ref.rollout
WORDS=(
    # N = 32 groups of n = 8, one optimizer step per batch, 16,384 tokens at temperature 0.8
    "data.train_files=$DATA_DIR/$DATA.parquet" "data.val_files=$DATA_DIR/aime-2024.parquet"
    data.train_batch_size=32 data.max_prompt_length=2048 data.max_response_length=16384 data.filter_overlong_prompts=True
    "actor_rollout_ref.model.path=$MODEL_DIR/$NAME" actor_rollout_ref.model.enable_gradient_checkpointing=True
    $ROLL.n=8 $ROLL.temperature=0.8 "$ROLL.name=$SERVER" $ROLL.tensor_model_parallel_size=2
    $ROLL.gpu_memory_utilization=0.6 $ROLL.log_prob_use_dynamic_bsz=True $ROLL.log_prob_max_token_len_per_gpu=20480
    $ROLL.val_kwargs.n=16 $ROLL.val_kwargs.top_p=0.7 $ROLL.val_kwargs.temperature=0.8 $ROLL.val_kwargs.do_sample=True
    $ACTOR.ppo_mini_batch_size=32 $ACTOR.use_dynamic_bsz=True $ACTOR.ppo_max_token_len_per_gpu=20480
    $ACTOR.optim.lr=1e-6 $ACTOR.optim.weight_decay=0.1 "$ACTOR.optim.betas=[0.9,0.98]"
    $ACTOR.clip_ratio_low=0.2 $ACTOR.clip_ratio_high=0.28 $ACTOR.use_kl_loss=False $ACTOR.entropy_coeff=0
    "reward.custom_reward_function.path=$HERE/reward.py"
    "trainer.nnodes=1" "trainer.n_gpus_per_node=$NUM_GPUS" trainer.total_epochs=1 trainer.save_freq=20 trainer.test_freq=10
    "trainer.default_local_dir=$SAVE_DIR/$NAME-$DATA-$ALGORITHM-$ENGINE-$ROLLOUT"
    trainer.project_name=april "trainer.experiment_name=$NAME-$DATA-$ALGORITHM-$ENGINE-$ROLLOUT"
)
case $ALGORITHM in
    grpo) WORDS+=(algorithm.adv_estimator=grpo) ;;
    dapo)
        WORDS+=(algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=reward)
        [ "$ROLLOUT" = plain ] && WORDS+=(data.gen_batch_size=1)
        ;;
    gspo)
        WORDS+=(algorithm.adv_estimator=grpo $ACTOR.policy_loss.loss_mode=gspo)
        WORDS+=($ACTOR.loss_agg_mode=seq-mean-token-mean)
        ;;
    *) wrong "ALGORITHM=$ALGORITHM must be grpo, dapo or gspo" ;;
esac
case $ENGINE in
    fsdp) WORDS+=($ACTOR.strategy=fsdp2 $ACTOR.fsdp_config.param_offload=True $ACTOR.fsdp_config.optimizer_offload=True) ;;
    megatron)
        WORDS+=(
            model_engine=megatron $ACTOR.megatron.tensor_model_parallel_size=2
            $ACTOR.megatron.param_offload=True $ACTOR.megatron.optimizer_offload=True
        )
        ;;
    *) wrong "ENGINE=$ENGINE must be fsdp or megatron" ;;
esac
case $PLATFORM in
    nvidia) ;;
    amd)
        export RAY_EXPERIMENTAL_NOSET_ROCR_VISIBLE_DEVICES=1 RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES=1
        HIP_VISIBLE_DEVICES=${HIP_VISIBLE_DEVICES:-$(seq -s, 0 $((NUM_GPUS - 1)))}
        export HIP_VISIBLE_DEVICES CUDA_VISIBLE_DEVICES=$HIP_VISIBLE_DEVICES
        ;;
    *) wrong "PLATFORM=$PLATFORM must be nvidia or amd" ;;
esac
case $ROLLOUT in
    # N' = 64
    april) WORDS+=('hydra.searchpath=[pkg://april.adapters.verl.conf]' +april=verl) ;;
    # the same N' by verl's own means, with the same correction
    own)
        WORDS+=(trainer.v1.trainer_mode=colocate_async trainer.v1.colocate_async.num_warmup_batches=1)
        WORDS+=(algorithm.rollout_correction.rollout_is=token)
        ;;
    plain) WORDS+=(trainer.v1.trainer_mode=sync) ;;
    *) wrong "ROLLOUT=$ROLLOUT must be april, own or plain" ;;
esac

if [ -n "${DRY_RUN:-}" ]; then
    printf '%s\n' "${WORDS[@]}" "$@"
    exit
fi
exec python3 -m verl.trainer.main_ppo "${WORDS[@]}" "$@"
