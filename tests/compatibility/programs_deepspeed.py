"""How people train with DeepSpeed: each function here is a training script, with as little else in it as can be.

They run in processes of their own (``forked.py``), under a DeepSpeed config with or without the block, and know nothing
of ds_tba but ``engine.activation_offloader``, whose report they return. Most train a small decoder of our own, because
much of what DeepSpeed has is called in the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP, UlyssesSPAttentionHF
from models import MODELS, Model, integers
from torch import Tensor, distributed, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WIDTH, HEADS, LENGTH, WORDS, LAYERS, EXPERTS = 64, 4, 32, 96, 3, 4
BATCH = 2

Call = Callable[[nn.Module, Tensor], Tensor]
Around = AbstractContextManager[Any]

NOTHING: Around = nullcontext()


def outcome(engine: Any, losses: list[float]) -> dict[str, Any]:
    """Return what is compared, and the report if there is one."""
    digests = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            data = parameter.detach().cpu().contiguous().view(torch.uint8).numpy()
            digests[name] = hashlib.sha256(data.tobytes()).hexdigest()
    offloader = getattr(engine, "activation_offloader", None)
    return {
        "losses": [float(loss).hex() for loss in losses],
        "parameters": digests,
        "report": offloader.report().to_dict() if offloader is not None else None,
    }


def started(config: dict[str, Any], build: Callable[[], nn.Module], **more: Any) -> Any:
    """An engine for a new model, with every random state set."""
    torch.manual_seed(0)
    model = build()
    options = {"model_parameters": model.parameters(), **more}
    engine, *_ = deepspeed.initialize(model=model, config=config, **options)
    torch.manual_seed(100 + engine.global_rank)
    return engine


def ended(engine: Any, losses: list[float], **more: Any) -> dict[str, Any]:
    result = {**outcome(engine, losses), **more}
    engine.destroy()
    return result


def loop(
    engine: Any, loss_of: Callable[[], Tensor], steps: int, own_backward: bool = False, around: Around = NOTHING
) -> list[float]:
    """Train for so many steps; return the loss of each micro-step. See :func:`trained`."""
    losses = []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        with around:
            loss = loss_of()
            (Tensor.backward if own_backward else engine.backward)(loss)
        engine.step()
        losses.append(loss.item())
    return losses


# ---- the decoder ----------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and an MLP, with dropout after each.

    Args:
        mlp: makes the MLP.
    """

    def __init__(self, mlp: Callable[[], nn.Module] = MLP) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = mlp()
        self.drop = nn.Dropout(0.1)

    def attended(self, x: Tensor) -> Tensor:
        heads = [each.transpose(1, 2) for each in self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        return self.drop(self.out(attended.flatten(2)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attended(x)
        return x + self.drop(self.mlp(self.norm2(x)))


class Net(nn.Module):
    """A decoder.

    Args:
        block: makes a block.
        call: calls a block, for those who checkpoint it.
    """

    def __init__(self, block: Callable[[], nn.Module] = Block, call: Call = lambda block, x: block(x)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.call = call

    def hidden(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = self.call(block, x)
        return self.norm(x)

    def forward(self, text: Tensor) -> Tensor:
        return self.loss(self.head(self.hidden(text)), text)

    def loss(self, scores: Tensor, text: Tensor) -> Tensor:
        return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())


def texts(rank: int) -> Iterator[Tensor]:
    """Batches without end."""
    chance = torch.Generator().manual_seed(1 + rank)
    while True:
        yield torch.randint(0, WORDS, (BATCH, LENGTH), generator=chance)


def text_of_a_new_length(batch: int, chance: torch.Generator) -> Tensor:
    return integers(WORDS, int(torch.randint(LENGTH // 2, 2 * LENGTH, (), generator=chance)))(batch, chance)


def train_on(engine: Any, batches: Iterator[Tensor], steps: int) -> list[float]:
    return loop(engine, lambda: engine(next(batches)), steps)


# ---- ZeRO, precision, batches ---------------------------------------------------------------------------------------


def trained(
    config: dict[str, Any],
    steps: int = 6,
    *,
    model: str = "Net",
    has_cache: bool = True,
    autocast: bool = False,
    own_backward: bool = False,
    evaluates: bool = False,
    detects_anomalies: bool = False,
    same_data: bool = False,
    around: Around = NOTHING,
) -> dict[str, Any]:
    """``deepspeed.initialize``, ``engine.backward``, ``engine.step``, for a model of ``NETS`` or ``MODELS``.

    Args:
        has_cache: Hugging Face's models fill a key-value cache in training, unless told not to.
        autocast: forward runs under the user's own.
        own_backward: the script calls ``loss.backward()``.
        evaluates: between steps, in inference mode.
        same_data: ranks that have parts of one model get the same data.
        around: each forward with its backward.
    """
    torch.autograd.set_detect_anomaly(detects_anomalies)
    trains = {**NETS, **MODELS}[model]

    def build() -> nn.Module:
        built = trains.build()
        for module in built.modules():
            if not has_cache and hasattr(getattr(module, "config", None), "use_cache"):
                module.config.use_cache = False
        return built

    engine = started(config, build)
    rank = 0 if same_data else engine.global_rank
    chance = torch.Generator().manual_seed(1 + rank)
    torch.manual_seed(100 + rank)

    def loss_of() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = engine(**trains.batch(BATCH, chance))
        return result if isinstance(result, Tensor) else result.loss

    evaluated: list[float] = []

    def loss_after_evaluation() -> Tensor:
        engine.eval()
        with torch.inference_mode():
            evaluated.append(loss_of().item())
        engine.train()
        return loss_of()

    losses = loop(engine, loss_after_evaluation if evaluates else loss_of, steps, own_backward, around)
    return ended(engine, losses + evaluated, skipped_steps=engine.skipped_steps)


def trained_with_a_look(config: dict[str, Any], steps: int = 8) -> dict[str, Any]:
    """The script gathers ZeRO-3's parameters between forward and backward, which lets go of them."""
    engine = started(config, Net)
    batches, looks = texts(engine.global_rank), []

    def loss_of() -> Tensor:
        loss = engine(next(batches))
        if engine.global_steps >= steps // 2:
            with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                looks.append(float(sum(one.sum() for one in engine.module.parameters())))
        return loss

    return ended(engine, loop(engine, loss_of, steps) + looks)


def trained_in_fp16(config: dict[str, Any], steps: int = 14) -> dict[str, Any]:
    """The plain loop with DeepSpeed's loss scale, which PyTorch can compute on a CPU of any kind."""
    get_accelerator().is_fp16_supported = lambda: True
    return trained(config, steps)


def trained_with_no_sync(config: dict[str, Any], steps: int = 4) -> dict[str, Any]:
    """Gradient accumulation by hand: gradients are reduced with the last micro-batch alone."""
    engine = started(config, Net)
    batches, losses = texts(engine.global_rank), []
    for _ in range(steps):
        with engine.no_sync():
            for _ in range(2):
                loss = engine(next(batches))
                engine.backward(loss)
                losses.append(loss.item())
        losses += train_on(engine, batches, 1)
    return ended(engine, losses)


def trained_two_engines(config: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """An actor and a critic: both go forward before either goes backward."""
    actor, critic = started(config, Net), started(config, Net)
    batches, losses = texts(actor.global_rank), []
    for _ in range(steps):
        text = next(batches)
        values, loss = critic(text), actor(text)
        loss = loss * values.detach()
        actor.backward(loss)
        critic.backward(values)
        actor.step()
        critic.step()
        losses += [loss.item(), values.item()]
    of_critic = ended(critic, [])["report"]
    result = ended(actor, losses)
    if of_critic is not None and not of_critic["offloaded_bytes"]:
        raise ValueError("the second engine moved nothing")
    return result


def trained_on_pairs(config: dict[str, Any], steps: int = 6) -> dict[str, Any]:
    """Two forwards before each backward, as preference losses have them."""
    engine = started(config, Net)
    batches = texts(engine.global_rank)

    def loss_of() -> Tensor:
        chosen, rejected = engine(next(batches)), engine(next(batches))
        return -nn.functional.logsigmoid(rejected - chosen) + 0.1 * chosen

    return ended(engine, loop(engine, loss_of, steps))


# ---- models that know ZeRO-3 ----------------------------------------------------------------------------------------


class Tied(Net):
    """The head is the embedding's weight, which ZeRO-3 has to be told."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()
        deepspeed.zero.register_external_parameter(self, self.embedding.weight)

    def forward(self, text: Tensor) -> Tensor:
        return self.loss(nn.functional.linear(self.hidden(text), self.embedding.weight), text)


def trained_from_zero_init(config: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """Built under ``zero.Init``; the head's weight is the embedding's; weights are changed between steps."""

    def build() -> nn.Module:
        with deepspeed.zero.Init(config_dict_or_path=config):
            return Tied()

    engine = started(config, build)
    batches, losses = texts(engine.global_rank), []
    for _ in range(steps):
        losses += train_on(engine, batches, 1)
        weight = engine.module.embedding.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            if engine.global_rank == 0:
                weight[0] = 0.0
    return ended(engine, losses)


class Routed(nn.Module):
    """Another MLP for each token, so that which weights a rank needs changes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.choice, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(MLP() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chances, chosen = self.choice(rows).softmax(-1).max(-1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == index)
            if len(places):
                out = out.index_add(0, places, expert(rows[places]) * chances[places, None])
        return out.view_as(x)


def with_leaf_modules() -> nn.Module:
    """ZeRO-3 gathers all experts of a layer at once, whichever are used."""
    model = Net(partial(Block, Routed))
    deepspeed.utils.set_z3_leaf_modules(model, [Routed])
    return model


def with_frozen_norms() -> nn.Module:
    """ZeRO-3 gathers frozen parameters for each use, also where a block runs again."""
    model = Net()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name)
    return model


# ---- checkpointing --------------------------------------------------------------------------------------------------


class Counted(Block):
    """Counts how often it runs, for the proof that it was made again in backward."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.runs += 1
        return super().forward(x)


class Odd(Counted):
    """Takes and returns more than a tensor."""

    def forward(self, x: Tensor, mask: Tensor, places: Tensor, nothing: None, scale: float, twice: Tensor) -> Any:
        if nothing is not None:
            raise TypeError("an argument that was None is something else")
        x = super().forward(x.index_select(1, places)) * mask.unsqueeze(-1) + scale * twice
        return x, mask.logical_not(), places + 0


def call_odd(block: nn.Module, x: Tensor) -> Tensor:
    """Checkpoint a block with what DeepSpeed's own tests pass: masks, indices, None, numbers, one tensor twice."""
    mask = torch.ones(x.shape[:2], dtype=torch.bool).tril(LENGTH // 2)
    places = torch.arange(x.shape[1]).flip(0)
    out, negated, same = deepspeed.checkpointing.checkpoint(block, x, mask, places, None, 0.5, x)
    if not torch.equal(negated, ~mask) or not torch.equal(same, places):
        raise ValueError("a checkpoint returned other masks or indices")
    return out


# Matrix products are saved, the rest is made again. Under ZeRO-3 only without ``memory_efficient_linear``: that adds a
# bias in place to what the policy has saved, and PyTorch does not notice. Backward then adds it twice: without us, and
# with us where PyTorch hands us nothing.
SAVED_OPS = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
CALLS: dict[str, Call] = {
    "torch, reentrant": partial(checkpoint, use_reentrant=True),
    "torch, non-reentrant": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, SAVED_OPS)
    ),
    "deepspeed": deepspeed.checkpointing.checkpoint,
    "deepspeed, non-reentrant": deepspeed.checkpointing.non_reentrant_checkpoint,
    "deepspeed, odd": call_odd,
}


def checkpoints_are_copies() -> None:
    """Have ``cpu_checkpointing`` put copies on the host, as on a GPU.

    On a CPU it is the input itself, which DeepSpeed then empties: the option fails there, also without us.
    """
    module = deepspeed.runtime.activation_checkpointing.checkpointing
    to_device = module.copy_to_device

    def copied(items: Any, device: Any, criterion_func: Callable[[Any], bool]) -> Any:
        if not isinstance(device, torch.device):  # the training device, which comes as its name
            return to_device(items, device, criterion_func)
        return [item.detach().clone() if criterion_func(item) else item for item in items]

    module.copy_to_device = copied


def checkpointed(config: dict[str, Any], call: str, steps: int = 5) -> dict[str, Any]:
    """Every block is checkpointed in one of these ways."""
    engine = started(config, partial(Net, Odd if CALLS[call] is call_odd else Counted, CALLS[call]))
    if "deepspeed" in call:
        checkpoints_are_copies()
        deepspeed.checkpointing.configure(None, deepspeed_config=config, num_checkpoints=LAYERS)
    losses = train_on(engine, texts(engine.global_rank), steps)
    return ended(engine, losses, runs=Counted.runs, micro_steps=steps * engine.gradient_accumulation_steps())


def saved(config: dict[str, Any], to: Path) -> dict[str, Any]:
    """Trains and saves a checkpoint."""
    engine = started(config, Net)
    losses = train_on(engine, texts(engine.global_rank), 4)
    engine.save_checkpoint(str(to), tag="saved")
    return ended(engine, losses)


def resumed(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """Goes on from a checkpoint."""
    engine = started(config, Net)
    if engine.load_checkpoint(str(source), tag="saved")[0] is None:
        raise FileNotFoundError(f"no checkpoint in {source}")
    return ended(engine, train_on(engine, texts(7 + engine.global_rank), 4))


# ---- long sequences -------------------------------------------------------------------------------------------------


class TiledMlp(MLP):
    """Runs in tiles of the sequence, and again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return TiledMLP.apply(MLP.forward, self, x, 4, list(self.parameters()))


class TiledLoss(Net):
    """The scores of all words are never there at once."""

    def forward(self, text: Tensor) -> Tensor:
        def loss(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(head(x).float(), y)

        x, y = self.hidden(text), text.roll(-1, 1)
        return TiledFusedLogitsLoss.apply(loss, self.head, x, y, None, 4, list(self.head.parameters()), "mean")


TEXT = {"text": integers(WORDS, LENGTH)}
NETS = {
    "Net": Model(Net, TEXT),
    "a new length in every step": Model(Net, {"text": text_of_a_new_length}),
    "leaf modules": Model(with_leaf_modules, TEXT),
    "frozen norms": Model(with_frozen_norms, TEXT),
    "TiledMLP": Model(partial(Net, partial(Block, TiledMlp)), TEXT),
    "TiledFusedLogitsLoss": Model(TiledLoss, TEXT),
}


def ulysses_of_hugging_face(config: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """A Llama over ranks that have a part of the sequence each."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = MODELS["Llama"].build()
    groups = UlyssesSPAttentionHF.register_with_transformers(
        model, model.config._attn_implementation, distributed.get_world_size(), BATCH, seq_length_is_variable=True
    )
    engine = started(config, lambda: model, mpu=groups)
    chance = torch.Generator().manual_seed(1)
    part = slice(engine.global_rank * LENGTH, (engine.global_rank + 1) * LENGTH)

    def loss_of() -> Tensor:
        text = torch.randint(0, WORDS, (BATCH, LENGTH * distributed.get_world_size()), generator=chance)
        places = torch.arange(text.shape[1]).expand_as(text)
        scores = engine(input_ids=text[:, part], position_ids=places[:, part], use_cache=False).logits
        return nn.functional.cross_entropy(scores.flatten(0, 1).float(), text.roll(-1, 1)[:, part].flatten())

    return ended(engine, loop(engine, loss_of, steps))


class Experts(nn.Module):
    """One of several experts, which the ranks share out among them."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(WIDTH, MLP(), EXPERTS, ep_size=distributed.get_world_size(), k=2, capacity_factor=1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0]


def with_experts(config: dict[str, Any], steps: int = 5) -> dict[str, Any]:
    """DeepSpeed's own mixture of experts."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Net(partial(Block, Experts))
    own = {"params": list(model.parameters()), "name": "parameters"}
    groups = split_params_into_different_moe_groups_for_optimizer(own)
    engine = started(config, lambda: model, model_parameters=groups)
    return ended(engine, train_on(engine, texts(engine.global_rank), steps))
