"""Known errors of the machine: GPUs, memory, files, processes."""

from lockstep.diagnose.entry import KnownError

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
