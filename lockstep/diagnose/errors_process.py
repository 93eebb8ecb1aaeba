"""Known errors of one process: of its machine (GPUs, memory, files), its model, gradients, checkpoints and data."""

from lockstep.diagnose import KnownError

MACHINE = (
    KnownError(
        "GPU memory is full",
        r"CUDA out of memory|torch\.(cuda\.)?OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "the model, its optimizer's state, gradients and activations do not fit on the GPU; on one GPU only, another "
        "process may be there, or all ranks use GPU 0",
        "lower training.batch_size (global_batch_size keeps the training the same), set "
        "training.gradient_checkpointing: full, or distributed.strategy: fsdp; `lockstep plan` says what fits",
        example="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity "
        "of 23.65 GiB of which 1.31 GiB is free.",
        needs="GPUs",
    ),
    KnownError(
        "host memory is full",
        r"DefaultCPUAllocator: (can't|not enough)|cannot allocate memory|\bMemoryError\b",
        "the machine, the container or the job's limit has no memory left",
        "fewer data.num_workers, a smaller prefetch_factor or batch; raise the limit (--mem, the container's); see "
        "`free -g` and `ulimit -v`",
    ),
    KnownError(
        "killed by the system",
        r"killed by SIGKILL",
        "something killed the process outright: mostly the kernel or the container, for memory",
        "`dmesg -T | grep -i kill`, or the container's and Slurm's limits; fewer data.num_workers, a smaller batch",
    ),
    KnownError(
        "shared memory is full",
        r"bus error|killed by SIGBUS|out of shared memory|unable to (open|mmap|resize) .*(shared memory|/torch_|bytes)",
        "/dev/shm is full or too small: data workers pass tensors through it, and containers get 64 MB",
        "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium Memory on /dev/shm; else fewer "
        "data.num_workers",
    ),
    KnownError(
        "too many open files",
        r"too many open files|received 0 items of ancdata|EMFILE",
        "the process has reached its limit of open files: each worker, connection and shared tensor takes some",
        "ulimit -n 65536 before the start; fewer data.num_workers",
    ),
    KnownError(
        "too many processes",
        r"can't start new thread|fork: retry|resource temporarily unavailable",
        "the user's or the container's limit of processes and threads is reached",
        "ulimit -u, the container's pids limit; OMP_NUM_THREADS=1; fewer data.num_workers",
    ),
    KnownError(
        "no such GPU",
        r"invalid device ordinal",
        "a rank asks for a GPU that it does not see: more ranks than GPUs, a global rank taken as device, or "
        "CUDA_VISIBLE_DEVICES hides it",
        "the device is the local rank; --nproc-per-node is at most what `nvidia-smi` and CUDA_VISIBLE_DEVICES show",
        example="torch.AcceleratorError: CUDA error: invalid device ordinal",
        needs="GPUs",
    ),
    KnownError(
        "CUDA is not there",
        r"not compiled with CUDA enabled|no CUDA GPUs are available|found no NVIDIA driver",
        "torch sees no GPU: a CPU build of torch, no driver, or CUDA_VISIBLE_DEVICES is empty",
        "distributed.device: cpu; or a CUDA build of torch on a machine where `nvidia-smi` shows a GPU (in a container "
        "with --gpus all)",
    ),
    KnownError(
        "the driver is too old",
        r"driver on your system is too old|driver version is insufficient|forward compatibility was attempted",
        "the NVIDIA driver is older than the CUDA that torch was built for",
        "a newer driver, or a torch built for an older CUDA; `lockstep doctor` shows both on all machines",
        example="The NVIDIA driver on your system is too old (found version 11040).",
        needs="GPUs",
    ),
    KnownError(
        "torch does not know this GPU",
        r"no kernel image is available",
        "torch was built without code for this GPU's generation",
        "a build of torch whose torch.cuda.get_arch_list() has the GPU's sm_NN",
        example="CUDA error: no kernel image is available for execution on the device",
        needs="GPUs",
    ),
    KnownError(
        "an assertion on the GPU",
        r"device-side assert triggered",
        "mostly an index out of range: a token id or a class beyond the model's size",
        "run with distributed.device: cpu, or CUDA_LAUNCH_BLOCKING=1, to see the line; check vocab_size and labels",
        example="torch.AcceleratorError: CUDA error: device-side assert triggered",
        needs="GPUs",
    ),
    KnownError(
        "illegal memory access",
        r"illegal memory access",
        "a kernel read or wrote outside of its memory: a custom kernel, or a fault in a library",
        "CUDA_LAUNCH_BLOCKING=1 to see the call; training.compile: false; compute-sanitizer",
        example="CUDA error: an illegal memory access was encountered",
        needs="GPUs",
    ),
    KnownError(
        "invalid configuration argument",
        r"CUDA error: invalid configuration argument",
        "a kernel was started with a grid that the GPU does not allow: often an empty or huge tensor",
        "check the batch for empty tensors; CUDA_LAUNCH_BLOCKING=1 shows the call; compare CUDA_VISIBLE_DEVICES with "
        "`nvidia-smi`",
        example="RuntimeError: CUDA error: invalid configuration argument",
        needs="GPUs",
    ),
    KnownError(
        "the GPU is broken",
        r"uncorrectable ECC|fallen off the bus|GPU is lost|device lost|CUDA error: unspecified launch failure|Xid",
        "the GPU or its memory failed",
        "take the machine out; `nvidia-smi -q -d ECC` and `dmesg | grep Xid` say more; the run goes on elsewhere with "
        "--resume auto",
        example="CUDA error: uncorrectable ECC error encountered",
        needs="a broken GPU",
    ),
    KnownError(
        "CUDA in a fork",
        r"cannot re-initialize CUDA in forked subprocess",
        "a process that uses CUDA was forked, and the child uses CUDA too",
        "start processes with `spawn` (lockstep.spawn does); call it before anything touches a GPU",
        example="RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
        "must use the 'spawn' start method",
        needs="GPUs",
    ),
    KnownError(
        "the program crashed",
        r"killed by SIGSEGV|segmentation fault|killed by SIGILL|illegal instruction",
        "a compiled library crashed: versions that do not fit, a CPU that lacks an instruction, a faulty extension",
        "the log ends with Python's stack; compare versions on all ranks with `lockstep doctor`; reinstall torch and "
        "extensions built for it",
    ),
    KnownError(
        "no space on the disk",
        r"no space left on device|ENOSPC|disk quota exceeded",
        "the disk or the quota is full",
        "free space, or --output-dir on another disk; checkpoint.save_total_limit keeps fewer checkpoints",
    ),
    KnownError(
        "no right",
        r"permission denied|EACCES|operation not permitted|read-only file system",
        "the user may not read, write or run that file here, or the disk is mounted read-only",
        "check owner and mode on every machine; --output-dir somewhere that is yours",
    ),
    KnownError(
        "the shared disk failed",
        r"stale file handle|input/output error|transport endpoint is not connected",
        "a network disk went away for a moment, or for good",
        "look at the mount; the run goes on from the newest checkpoint with --resume auto",
    ),
    KnownError(
        "a library is missing",
        r"cannot open shared object file|undefined symbol",
        "a compiled library is missing, or was built for another version of torch or CUDA",
        "install it on every machine; rebuild extensions after torch was changed; see LD_LIBRARY_PATH",
    ),
    KnownError(
        "a module is missing",
        r"no module named",
        "the package is not installed in this environment, or the script runs in another folder",
        "install it on every machine; start from the folder of the code, or set PYTHONPATH",
    ),
)


TRAINING = (
    KnownError(
        "expected to have finished reduction",
        r"expected to have finished reduction",
        "DDP waits for gradients that never came: parameters that took no part in the loss of the step before",
        "distributed.ddp.find_unused_parameters: true if that is meant (Lockstep names them); else use or freeze them",
    ),
    KnownError(
        "a parameter is ready twice",
        r"expected to mark a variable ready only once|marked as ready twice",
        "under DDP a parameter got its gradient twice in one backward: reentrant checkpointing of a shared layer, or a "
        "parameter used outside forward",
        "training.gradient_checkpointing (not reentrant), or distributed.ddp.static_graph: true",
    ),
    KnownError(
        "nothing to train under DDP",
        r"DistributedDataParallel is not needed when a module doesn't have any parameter",
        "all parameters of the model are frozen",
        "set requires_grad on those that are to be trained, before the model is placed",
    ),
    KnownError(
        "DDP hides the model",
        r"'(DistributedDataParallel|DataParallel|FullyShardedDataParallel)' object has no attribute",
        "the wrapper has not the model's own methods",
        "call the model itself and take the loss from its outputs; attributes are at model.module.NAME, but calling "
        "methods there skips the reduction of gradients",
    ),
    KnownError(
        "tensors on different devices",
        r"expected all tensors to be on the same device|is not on the expected device|"
        r"input type .* and weight type .* should be the same",
        "the batch, the model or a tensor made inside forward is on another device, or was never moved there",
        "move the batch to lockstep's device (Trainer does); make tensors in forward with device=x.device; register "
        "constants as buffers",
    ),
    KnownError(
        "dtypes differ",
        r"must have the same dtype|to have the same dtype|expected (scalar type|m1 and m2)|same dtype, but got",
        "tensors of different precision meet: an input in fp64 or fp16, or a part that was cast by hand",
        "leave casting to precision.mode; NumPy data are fp64: .float() them",
    ),
    KnownError(
        "shapes do not fit",
        r"shapes cannot be multiplied|the size of tensor a \(\d+\) must match|shape '.*' is invalid for input",
        "the batch has another shape than the model was built for; or a layer that is cut over tensor_size ranks is "
        "followed by code that counts on all of its heads or units",
        "compare the batch's shape with the model's arguments (block_size, image_size): `lockstep config show`; "
        "between cut layers view(…, -1, head_width) takes any number of heads",
    ),
    KnownError(
        "index out of range",
        r"index out of range in self|target -?\d+ is out of bounds",
        "a token id or a class label is not below the model's size, or is negative",
        "vocab_size must be above the largest token id, the classes above the largest label; -100 marks what is not "
        "counted",
    ),
    KnownError(
        "modified in place",
        r"modified by an inplace operation|leaf variable that requires grad is being used in an in-place",
        "a tensor that backward needs was overwritten",
        "write x = x + 1 for x += 1 (and relu(x) for relu_(x)) in the model; torch.no_grad() around changes of weights",
    ),
    KnownError(
        "backward twice",
        r"backward through the graph a second time",
        "one forward's graph was used by two backwards: a loss that is kept between steps, or a hidden state",
        "detach what is carried from one step to the next; call backward once a forward",
    ),
    KnownError(
        "nothing requires a gradient",
        r"does not require grad and does not have a grad_fn",
        "the loss does not depend on a parameter that is trained: frozen weights, no_grad, .detach() or .item()",
        "look for torch.no_grad(), .detach(), .numpy() between the parameters and the loss",
    ),
    KnownError(
        "not a number in backward",
        r"returned nan values in its",
        "an operation's gradient is NaN: sqrt or a division at 0, log of 0, or an overflow in fp16",
        "add an epsilon there; precision.mode: bf16; lower training.learning_rate",
    ),
    KnownError(
        "the loss scaler is misused",
        r"_scale is None|no inf checks were recorded|unscale_\(\) has already been called|attempting to unscale FP16",
        "scale, backward, unscale_, step and update did not come in this order, or parameters are in fp16 themselves",
        "precision.mode: fp16 does it; parameters stay in fp32; bf16 needs no scaler",
    ),
    KnownError(
        "an optimizer without parameters",
        r"optimizer got an empty parameter list",
        "the optimizer was made before the model had parameters, or from a generator that was used up",
        "make it after the model; pass list(model.parameters()) where it is read twice",
    ),
    KnownError(
        "sharded and whole tensors mixed",
        r"mixed torch\.Tensor and DTensor",
        "under FSDP parameters are DTensors, and an operation met one of them and a plain tensor",
        "use parameters inside forward only, where they are whole; elsewhere .full_tensor() on all ranks",
    ),
    KnownError(
        "torch.compile failed",
        r"torch\._dynamo\.exc|\bUnsupported: |BackendCompilerFailed|InductorError|InvalidCxxCompiler",
        "torch.compile can't translate this code, or finds no C++ compiler",
        "training.compile: false shows whether it is that; mend the line that is named; install gcc",
    ),
    KnownError(
        "keys with a wrapper's prefix",
        r"unexpected key\(s\) in state_dict: \"(module\.|_orig_mod\.|model\.module\.)",
        "the checkpoint was saved from a wrapped model: DDP adds `module.`, compile `_orig_mod.`",
        "`lockstep checkpoint convert` writes canonical names; or strip the prefix from the keys",
    ),
    KnownError(
        "another model's checkpoint",
        r"(missing|unexpected) key\(s\) in state_dict|size mismatch for [\w.]+: copying a param",
        "the checkpoint's names or shapes are not those of the model: another config, or another version of the code",
        "use the config that was saved with it; `lockstep checkpoint inspect PATH` lists names and shapes",
    ),
    KnownError(
        "a checkpoint with code in it",
        r"weights only load failed",
        "the file holds more than tensors, and loading it could run a program",
        "save and load a state_dict; weights_only=False only for a file that you made yourself",
    ),
    KnownError(
        "a damaged checkpoint",
        r"failed finding central directory|PytorchStreamReader failed|pickle data was truncated|invalid header",
        "the file was cut short or changed: a full disk, a killed save, a broken copy",
        "go back to the one before; Lockstep's own checkpoints are whole or invisible (`lockstep checkpoint verify`)",
    ),
    KnownError(
        "a checkpoint from a GPU",
        r"attempting to deserialize object on (a )?CUDA",
        "the file was saved from a GPU that is not here",
        "torch.load(path, map_location='cpu'), then load_state_dict; Lockstep's own checkpoints know no device",
    ),
    KnownError(
        "samples of unequal size",
        r"stack expects each tensor to be equal size",
        "the samples of one batch have different shapes",
        "pad or crop in the dataset, or give a collate_fn",
    ),
    KnownError(
        "samples that can't be batched",
        r"default_collate: batch must contain",
        "the dataset returns objects that torch can't stack",
        "return tensors, arrays, numbers, or dicts and tuples of them; or give a collate_fn",
    ),
    KnownError(
        "a data worker was killed",
        r"DataLoader worker \(pid.*\) (exited unexpectedly|is killed by signal)",
        "a data worker ended: mostly for memory, or by a crash in a library",
        "fewer data.num_workers, a smaller prefetch_factor; with num_workers=0 the error shows itself",
    ),
    KnownError(
        "the dataset raised",
        r"Caught \w+ in DataLoader worker process",
        "the dataset's own code failed in a data worker",
        "the message goes on with the worker's traceback; with data.num_workers=0 a debugger gets there",
    ),
    KnownError(
        "can't be sent to a process",
        r"can't pickle|cannot pickle|can't get local object",
        "a lambda, a local function or an open file would have to travel to a data worker or a rank",
        "define it at the top of a module; open files in the worker",
    ),
    KnownError(
        "no main guard",
        r"finished its\s+bootstrapping phase|calls lockstep\.spawn while a rank is importing it",
        "the script starts processes at its top level, and each of them imports the script",
        "put the start below `if __name__ == '__main__':`",
    ),
    KnownError(
        "no way to the hub",
        r"couldn't connect to 'https://huggingface|offline mode|Max retries exceeded with url|LocalEntryNotFoundError",
        "a dataset or model was to be fetched, and this machine can't reach the hub",
        "fetch it once where there is a network (`lockstep data prepare`), and point to the folder",
    ),
)
