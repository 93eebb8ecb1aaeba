"""Known errors of models, gradients, checkpoints and data."""

from lockstep.diagnose.entry import KnownError

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
        "the batch has another shape than the model was built for",
        "compare the batch's shape with the model's arguments (block_size, image_size): `lockstep config show`",
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
