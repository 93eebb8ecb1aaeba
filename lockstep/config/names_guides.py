"""The table of foreign names, part 1: five training guides. Rows are (theirs, ours, value, note) of `ForeignName`."""

from typing import Literal

Kind = Literal["key", "flag", "value", "python", "command", "env"]
Row = tuple[str, ...]
Rows = tuple[Row, ...]

STRATEGY = "distributed.strategy"
CLIP = "training.gradient_clip"
ACCUMULATION = "training.gradient_accumulation_steps"
CHECKPOINTING = "training.gradient_checkpointing"
WRAP = "distributed.fsdp.auto_wrap_policy"
NPROC = "--nproc-per-node"
NO_DATA = "each rank reads its own samples"
LAUNCHER = "the launcher sets it, and Lockstep reads it"

BDH_FLAGS: Rows = (
    ("--distributed", NPROC, "", "several processes are distributed training; no switch"),
    ("--use_ddp", STRATEGY, "ddp"),
    ("--use_fsdp", STRATEGY, "fsdp"),
    ("--dataset_name", "data.name", "", "hf:wikitext for wikitext"),
    ("--grad_clip", CLIP, "", "0 is off"),
    ("--checkpoint_dir", "--output-dir"),
)
BDH_KEYS: Rows = (
    ("MAX_ITERS", "training.max_steps", "", "a step is one update, however many micro-batches it takes"),
    ("LOG_FREQ", "monitor.log_steps"),
    ("SAVE_FREQ", "checkpoint.save_steps"),
    ("dtype", "precision.mode", "", "float16 is fp16, bfloat16 is bf16, float32 is fp32"),
    ("accumulation_steps", ACCUMULATION),
    ("mlp_internal_dim_multiplier", "model.args.mlp_multiplier"),
)
BDH_PYTHON: Rows = (
    ("setup_distributed()", "lockstep.setup()"),
    ("cleanup_distributed()", "lockstep.cleanup()"),
    ("get_rank()", "lockstep.rank()"),
    ("get_world_size()", "lockstep.world_size()"),
    ("is_main_process()", "lockstep.is_main_process()"),
    ("wrap_model_ddp(model, device)", 'lockstep.Trainer(model, strategy="ddp")'),
    ("wrap_model_fsdp(model)", 'lockstep.Trainer(model, strategy="fsdp")'),
    ("DistributedSampler(dataset_size, batch_size)", "lockstep.DistributedSampler(…)", "", "nothing is left out"),
    ("save_checkpoint_distributed(…)", "trainer.save_checkpoint(path)", "", "called by all ranks"),
    ("load_checkpoint_distributed(…)", "trainer.load_checkpoint(path)"),
    ("checkpoint_manager", "checkpoint", "", "the section"),
    ("size_based_auto_wrap_policy(min_num_params=…)", WRAP, "size", "and distributed.fsdp.min_num_params"),
    ("torch.cuda.amp.autocast(), GradScaler()", "precision.mode", "fp16", "bf16 needs no scaler"),
    ("torch.compile(model)", "training.compile", "true"),
)
BDH_COMMANDS: Rows = (
    ("scripts/train_distributed.sh", "lockstep train CONFIG --nproc-per-node 4"),
    ("torchrun --nproc_per_node=4 train.py", "torchrun --nproc_per_node=4 -m lockstep train CONFIG", "", "also works"),
)

FORGATHER_KEYS: Rows = (
    ("output_dir", "--output-dir"),
    ("per_device_train_batch_size", "training.batch_size"),
    ("per_device_eval_batch_size", "training.eval_batch_size"),
    ("per_device_batch_size", "training.batch_size"),
    ("total_batch_size", "training.global_batch_size"),
    ("logging_steps", "monitor.log_steps"),
    ("torch_compile", "training.compile"),
    ("resume_from_checkpoint", "checkpoint.resume", "", "true is auto"),
    ("accelerator_args", "distributed.accelerate"),
    ("accelerator_args.device_placement", "distributed.accelerate.device_placement"),
    ("accelerator_args.cpu", "distributed.accelerate.cpu"),
    ("accelerator_args.mixed_precision", "precision.mode", "", "no is fp32"),
    ("accelerator_args.backend", "distributed.backend"),
    ("accelerator_args.gradient_accumulation_steps", ACCUMULATION),
    ("gradient_accumulation_plugin", ACCUMULATION, "", "the value of num_steps"),
    ("gradient_accumulation_plugin.num_steps", ACCUMULATION),
    ("gradient_accumulation_plugin.adjust_scheduler", "", "", "leave it out: the schedule counts updates"),
    ("split_batches", "training.batch_size", "", f"a rank's own; {NO_DATA}, so nothing is split"),
    ("dispatch_batches", "", "", f"leave it out: {NO_DATA}"),
    ("even_batches", "", "", "leave it out: no sample is repeated to fill a batch, short ones are weighted"),
    ("use_seedable_sampler", "training.seed", "", "the order of samples follows from the seed"),
    ("dataloader_config", "data", "", "num_workers, pin_memory, prefetch_factor, persistent_workers"),
    ("dataloader_config.num_workers", "data.num_workers"),
    ("dataloader_config.pin_memory", "data.pin_memory"),
    ("dataloader_config.persistent_workers", "data.persistent_workers"),
    ("dataloader_config.prefetch_factor", "data.prefetch_factor"),
    ("pipeline_chunks", ACCUMULATION, "", "the schedule takes the step's micro-batches: their batch 4 in 4 chunks is "
     "training.batch_size 1 with accumulation 4"),
    ("schedule_class", "distributed.pipeline.schedule", "", "without the word Schedule: 1F1B"),
    ("checkpoint_sequential", CHECKPOINTING, "sequential"),
    ("pipeline_parallel_size", "distributed.pipeline_size", "", "in ranks: their stages / stages_per_rank"),
    ("data_parallel_size", "distributed.replicate_size", "", "or shard_size, to cut the parameters"),
    ("distributed_env", "distributed", "", "in a template: the block distributed_env"),
    ("trainer_callbacks", "monitor.callbacks", "", "in a template: the block trainer_callbacks"),
    ("trainer_args", "training", "", "in a template: the block trainer_args"),
    ("gpu_memory_threshold", "monitor.memory.threshold"),
    ("rank_filter", "", "", "leave it out: the main process writes; lockstep.monitor.callbacks:JsonLogger has it"),
)  # fmt: skip
FORGATHER_PYTHON: Rows = (
    ("Trainer", STRATEGY, "single"),
    ("AccelTrainer", STRATEGY, "accelerate"),
    ("PipelineTrainer", STRATEGY, "pipeline"),
    ("forgather.ml.distributed:DistributedEnvironment", "distributed", "", "its keywords are keys of this section"),
    ("forgather.ml.tb_logger:TBLogger", "monitor.sinks", "[tensorboard]"),
    ("forgather.ml.json_logger:JsonLogger", "monitor.sinks", "[jsonl]"),
    ("custom_callbacks:ResourceMonitorCallback", "monitor.memory"),
    ("TrainerCallback.on_step_end", "monitor.callbacks", "[package.module:Name]"),
    ("get_split_spec(model, num_stages)", "distributed.pipeline.split_spec", "{}", "empty cuts evenly"),
    ("calculate_resources(…)", "lockstep plan CONFIG"),
    ("torch.profiler.profile(schedule(wait, warmup, active))", "monitor.profile"),
    ("tensorboard_trace_handler(dir)", "monitor.profile.dir"),
)
FORGATHER_FLAGS: Rows = (
    ("--num_processes", NPROC, "", "theirs counts all machines, ours one"),
    ("--num_machines", "--nnodes"),
    ("--machine_rank", "--node-rank"),
    ("--main_process_ip", "--master-addr"),
    ("--main_process_port", "--master-port"),
)
FORGATHER_COMMANDS: Rows = (
    ("accelerate config", "lockstep config show CONFIG"),
    ("accelerate launch scripts/train_script.py my_config.yaml", "lockstep train my_config.yaml"),
    ("-- extends 'trainers/accel_trainer.yaml'", "-- extends 'trainers/accelerate.yaml'", "", "theirs works too"),
    ("-- extends 'trainers/pipeline_trainer.yaml'", "-- extends 'trainers/pipeline.yaml'", "", "theirs works too"),
)
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
FORGATHER_VALUES: Rows = (
    *((f"Schedule{name}", "distributed.pipeline.schedule", name) for name in SCHEDULES),
    ("ZBV", "distributed.pipeline.schedule", "ZBVZeroBubble"),
    ("true", "checkpoint.resume", "auto"),
    ("false", "checkpoint.resume", "never"),
)
NCCL_ENV: Rows = (
    ("NCCL_TIMEOUT", "distributed.timeout_seconds", "", "the variable does nothing in torch"),
    ("NCCL_TIMEOUT_SECONDS", "distributed.timeout_seconds", "", "the variable does nothing in torch"),
    ("NCCL_DEBUG", "distributed.debug", "info"),
    ("NCCL_BLOCKING_WAIT", "", "", "leave it out: a collective that times out ends the run"),
)

GEOMETRY_KEYS: Rows = (
    ("use_dynamic_scaling", "precision.loss_scale.dynamic"),
    ("dynamic_history_size", "precision.loss_scale.history_size"),
    ("initial_scale", "precision.loss_scale.initial_scale"),
    ("T_max", "training.max_steps", "", "the cosine ends with the run"),
    ("eta_min", "training.min_lr_ratio", "", "a share of the peak"),
)
GEOMETRY_FLAGS: Rows = (("--num_gpus", NPROC), ("--num_nodes", "--nnodes"))
GEOMETRY_PYTHON: Rows = (
    (
        "DistributedAMPTrainer(model, config, rank, world_size)",
        'lockstep.Trainer(model, strategy="ddp", precision="fp16")',
    ),
    ("create_default_amp_config(…)", "precision", "", "mode and loss_scale"),
    ("trainer.training_step(batch)", "trainer.training_step(batch)"),
    ("trainer.is_main_process", "trainer.is_main_process"),
    ("trainer.scaler.get_scale()", "trainer.scaler.get_scale()"),
    (
        "trainer.save_checkpoint(path, include_optimizer, metadata)",
        "trainer.save_checkpoint(path, …)",
        "",
        "by all ranks",
    ),
    ("trainer.load_checkpoint(path)", "trainer.load_checkpoint(path)"),
    ("learning_rate * num_gpus", "training.lr_scaling", "linear", "with base_batch_size"),
    ("learning_rate * sqrt(num_gpus)", "training.lr_scaling", "sqrt", "with base_batch_size"),
    ("get_lr(step, warmup_steps, base_lr, num_gpus)", "training.warmup_steps"),
    ("CosineAnnealingLR(optimizer, T_max, eta_min)", "training.lr_schedule", "cosine"),
    ("mp.spawn(train, args, nprocs)", "lockstep.spawn(fn, args, nprocs)"),
)
GEOMETRY_COMMANDS: Rows = (
    ("scripts/train_dist_torchrun.sh --num_gpus 4 --config C", "lockstep train C --nproc-per-node 4"),
    ("scripts/train_multinode.sh --num_nodes 2 …", "lockstep train C --nnodes 2 --node-rank R --master-addr HOST"),
    ("python -m torch.distributed.launch …", "python -m torch.distributed.launch … -m lockstep train C"),
)
NCCL_TUNING = ("IB_DISABLE", "P2P_LEVEL", "SOCKET_IFNAME", "NET_GDR_LEVEL", "SOCKET_NTHREADS", "NSOCKS_PERTHREAD")
RANK_FACTS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GEOMETRY_ENV: Rows = (
    *((f"NCCL_{name}", "distributed.env", f"{{NCCL_{name}: …}}") for name in NCCL_TUNING),
    *((name, "", "", LAUNCHER) for name in RANK_FACTS),
)

FRAMEWORM_KEYS: Rows = (
    ("epochs", "training.num_train_epochs"),
    ("matrix_approximation_rank", "distributed.ddp.compression.rank"),
    ("start_powerSGD_iter", "distributed.ddp.compression.start_step"),
    ("use_error_feedback", "distributed.ddp.compression.error_feedback"),
)
FRAMEWORM_PYTHON: Rows = (
    ("Config.from_file('config.yaml')", "Config.from_file('config.yaml')"),
    ("get_model('vae')(config)", "get_model('vae')(config)"),
    ("torch.nn.DataParallel(model)", STRATEGY, "dp", "hand the bare model to Trainer"),
    ("DDP(model, device_ids=[rank])", STRATEGY, "ddp", "hand the bare model to Trainer"),
    ("Trainer(model, optimizer, device='cuda')", "lockstep.Trainer(model, optimizer, device='cuda')"),
    ("trainer.train(train_loader, val_loader, epochs=50)", "trainer.train(train_loader, val_loader, epochs=50)"),
    ("setup(rank, world_size)", "lockstep.setup()"),
    ("cleanup()", "lockstep.cleanup()"),
    (
        "DistributedSampler(train_dataset, num_replicas, rank)",
        "lockstep.DistributedSampler(…)",
        "",
        "or none: Trainer's order",
    ),
    ("batch_size=128 // world_size", "training.global_batch_size", "128"),
    ("mp.spawn(train_ddp, args, nprocs=world_size)", "lockstep.spawn(fn, args, nprocs=world_size)"),
    ("model.register_comm_hook(state, powerSGD_hook)", "distributed.ddp.compression.kind", "powersgd"),
    ("autocast(), GradScaler()", "precision.mode", "fp16"),
    ("dist.all_reduce(loss); loss / world_size", 'lockstep.all_reduce(loss, op="mean")'),
    ("trainer.enable_gradient_checkpointing()", "trainer.enable_gradient_checkpointing()"),
)

FREE_KEYS: Rows = (
    ("use_fsdp", STRATEGY, "fsdp"),
    ("use_ddp", STRATEGY, "ddp"),
    ("fsdp_sharding_strategy", "distributed.fsdp.sharding_strategy"),
    ("fsdp_backward_prefetch", "distributed.fsdp.backward_prefetch", "", "pre, post or none"),
    ("fsdp_forward_prefetch", "distributed.fsdp.forward_prefetch"),
    ("fsdp_auto_wrap_policy", WRAP, "", "transformer, size or class names"),
    ("fsdp_min_num_params", "distributed.fsdp.min_num_params"),
    ("fsdp_state_dict_type", "checkpoint.format", "", "full, local or sharded"),
    ("fsdp_mixed_precision", "precision.mode", "bf16"),
    ("fsdp_param_dtype", "precision.mode", "", "bfloat16 is bf16: computed in it, kept in fp32; to keep them in it, "
     "precision.param_dtype"),
    ("fsdp_reduce_dtype", "distributed.fsdp.reduce_dtype", "", "fp32, bf16 or fp16"),
    ("fsdp_buffer_dtype", "distributed.fsdp.buffer_dtype", "", "fp32, bf16 or fp16"),
    ("bf16", "precision.mode", "bf16"),
    ("fp16", "precision.mode", "fp16"),
    ("gradient_clip_norm", CLIP, "", "a number is a norm"),
    ("hidden_dim", "model.args.n_embd"),
    ("num_layers", "model.args.n_layer"),
    ("num_heads", "model.args.n_head"),
    ("latent_dim", "model.args.latent_bits"),
)  # fmt: skip
DTYPES = (("bfloat16", "bf16"), ("float32", "fp32"), ("float16", "fp16"))
DTYPE_KEYS = ("precision.mode", "distributed.fsdp.reduce_dtype", "distributed.fsdp.buffer_dtype")
FREE_VALUES: Rows = (
    ("backward_pre", "distributed.fsdp.backward_prefetch", "pre"),
    ("backward_post", "distributed.fsdp.backward_prefetch", "post"),
    ("transformer_auto_wrap", WRAP, "transformer"),
    ("transformer_auto_wrap_policy", WRAP, "transformer"),
    ("transformer_based_wrap", WRAP, "transformer"),
    ("size_based_auto_wrap", WRAP, "size"),
    ("size_based_auto_wrap_policy", WRAP, "size"),
    ("size_based_wrap", WRAP, "size"),
    ("full_state_dict", "checkpoint.format", "full"),
    ("local_state_dict", "checkpoint.format", "local"),
    ("sharded_state_dict", "checkpoint.format", "sharded"),
    ("true", CHECKPOINTING, "full"),
    ("false", CHECKPOINTING, "none"),
    *((theirs, key, ours) for key in DTYPE_KEYS for theirs, ours in DTYPES),
    *((theirs, "precision.param_dtype", ours) for theirs, ours in DTYPES[:2]),
)
FREE_PYTHON: Rows = (
    ("FSDP(model, …)", STRATEGY, "fsdp", "hand the bare model to Trainer"),
    ("ModuleWrapPolicy({DecoderBlock})", WRAP, "[DecoderBlock]"),
    ("CPUOffload(offload_params=True)", "distributed.fsdp.cpu_offload", "true"),
    ("scaled_lr = base_lr * effective / base", "training.lr_scaling", "linear", "with base_batch_size"),
    ("print_memory_stats()", "monitor.memory", "", "each rank reports its own"),
    ("prof.export_chrome_trace(path)", "monitor.profile.dir"),
)
FREE_COMMANDS: Rows = (
    ("make train-free-fsdp", "lockstep train CONFIG --strategy fsdp", "", "model.name: free_transformer"),
    ("make train-baseline-fsdp", "lockstep train CONFIG --strategy fsdp", "", "model.name: transformer"),
    ("torchrun … examples/train_free.py --config C --use-fsdp", "torchrun … -m lockstep train C --strategy fsdp"),
)
FREE_ENV: Rows = (("TORCH_DISTRIBUTED_DEBUG", "distributed.debug", "detail"),)

GUIDES: tuple[tuple[str, Kind, Rows], ...] = (
    ("bdh", "flag", BDH_FLAGS),
    ("bdh", "key", BDH_KEYS),
    ("bdh", "python", BDH_PYTHON),
    ("bdh", "command", BDH_COMMANDS),
    ("forgather", "key", FORGATHER_KEYS),
    ("forgather", "value", FORGATHER_VALUES),
    ("forgather", "flag", FORGATHER_FLAGS),
    ("forgather", "python", FORGATHER_PYTHON),
    ("forgather", "command", FORGATHER_COMMANDS),
    ("forgather", "env", NCCL_ENV),
    ("geometry_os", "key", GEOMETRY_KEYS),
    ("geometry_os", "flag", GEOMETRY_FLAGS),
    ("geometry_os", "python", GEOMETRY_PYTHON),
    ("geometry_os", "command", GEOMETRY_COMMANDS),
    ("geometry_os", "env", GEOMETRY_ENV),
    ("frameworm", "key", FRAMEWORM_KEYS),
    ("frameworm", "python", FRAMEWORM_PYTHON),
    ("free_transformer", "key", FREE_KEYS),
    ("free_transformer", "value", FREE_VALUES),
    ("free_transformer", "python", FREE_PYTHON),
    ("free_transformer", "command", FREE_COMMANDS),
    ("free_transformer", "env", FREE_ENV),
)
