"""Single parts on several ranks, compared on every rank with the whole. Run by `test_pieces`."""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import zoo
import zoo_hybrid
from scripted import small_drafter

from eagle4 import Eagle4ForCausalLM
from eagle4.drafter.sharded import shard_drafter
from eagle4.engine.graphs import num_compiled
from eagle4.parallel import RankError, Ranks, VocabShard, shard_target
from eagle4.training.extract import extract
from eagle4.training.manifest import weights_fingerprint
from tests.engine.compare import prompt

TIE = 1 << 20


def vocabulary(ranks: Ranks) -> dict[str, Any]:
    """Best tokens, whole rows and top rows of shared logits, with ties, NaN and infinities."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Any] = {}
    for size in (24, 41):
        vocab = VocabShard(ranks, size)
        # Few values: nearly every row's maximum is a tie, mostly between ranks.
        whole = torch.randint(0, 4, (200, size), generator=generator).float()
        whole[0, -1], whole[1, 3], whole[2] = float("nan"), float("inf"), float("-inf")
        whole[3] = 0.0
        whole[3, ::2] = -0.0
        part = whole[:, vocab.first : vocab.last]
        value, token = vocab.best(part)
        found[f"best {size}"] = torch.equal(token, whole.argmax(dim=-1))
        wanted = whole.double().gather(1, token[:, None])[:, 0]
        found[f"value {size}"] = torch.equal(value.nan_to_num(TIE), wanted.nan_to_num(TIE))
        found[f"full {size}"] = torch.equal(vocab.full(part).nan_to_num(TIE), whole.nan_to_num(TIE))
        distinct = torch.randn(50, size, generator=generator)
        for k in (1, 5, size):
            rows = vocab.top_rows(distinct[:, vocab.first : vocab.last], k)
            assert rows is not None
            kept = distinct >= distinct.topk(k, dim=-1).values[:, -1:]
            is_right = torch.equal(rows[kept], distinct[kept])
            rest = rows[~kept]
            found[f"top {k} of {size}"] = is_right and bool(
                ((rest == float("-inf")) | (rest == distinct[~kept])).all()
            )
    # More ties with the k-th score than a rank sends: whole rows have to be asked for.
    vocab = VocabShard(ranks, 64)
    equal = torch.zeros(3, vocab.share.size)
    found["too many ties"] = vocab.top_rows(equal, 2) is None
    return found


def families(ranks: Ranks, names: list[str]) -> dict[str, float | str]:
    """Largest difference of a split family's logits from the whole's, or why it is refused."""
    found: dict[str, float | str] = {}
    ids = torch.arange(2, 14).view(2, 6)
    for name in names:
        # Sizes that divide by 2 and 4, and soft caps that do not hide errors.
        whole, split = zoo.build(name), zoo.build(name)
        try:
            shard_target(split, ranks)
        except ValueError as error:
            found[name] = str(error)
            continue
        with torch.no_grad():
            wanted, got = whole(input_ids=ids).logits, split(input_ids=ids).logits
        parameters = [sum(p.numel() for p in m.parameters()) for m in (split, whole)]
        assert parameters[0] < parameters[1], name
        assert weights_fingerprint(split, ranks) == weights_fingerprint(whole), name
        found[name] = float((wanted - got).abs().max() / wanted.std())
    return found


def hybrids(ranks: Ranks | None, names: list[str]) -> dict[str, Any]:
    """Ids of targets with recurrent layers, or why they are refused."""
    found: dict[str, Any] = {}
    for name in names:
        target = zoo_hybrid.build(name)
        model = Eagle4ForCausalLM(target, small_drafter(target))
        try:
            model = model if ranks is None else model.shard(ranks)
        except ValueError as error:
            found[name] = str(error)
            continue
        speculative = {"harness": False, "max_depth": 2, "max_nodes": 6}
        kwargs = {"max_new_tokens": 8, "do_sample": False, "speculative": speculative}
        found[name] = model.generate(**prompt([4, 3]), **kwargs).tolist()
    return found


def drafters(ranks: Ranks) -> dict[str, float]:
    """Largest difference of proposals: low-rank head, full head, own head, reduced vocabulary."""
    found = {}
    kinds: dict[str, dict[str, Any]] = {
        "candidates": {},
        "own head": {"own_lm_head": True},
        "full head": {"candidate_rank": 0},
        "reduced": {"candidate_rank": 0, "own_lm_head": True, "draft_vocab_size": 10},
        "heads that do not divide": {"num_attention_heads": 3, "num_key_value_heads": 3},
    }
    for name, settings in kinds.items():
        pairs = []
        for _ in range(2):
            target = zoo.build("llama", vocab_size=24, num_hidden_layers=2)
            drafter = small_drafter(target, **settings)
            drafter.bind(target.get_input_embeddings(), target.get_output_embeddings())
            if settings.get("draft_vocab_size"):
                drafter.d2t[:] = 2
                drafter.t2d[2:12] = True
            pairs.append((target, drafter))
        (_, whole), (target, split) = pairs
        shard_drafter(split, shard_target(target, ranks))
        hidden = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
        token, position = torch.arange(7), torch.arange(7)

        def itself(query, key, value):
            return value.repeat_interleave(query.shape[-2] // value.shape[-2], dim=-2)

        with torch.no_grad():
            outs = [d(hidden, token, position, itself) for d in (whole, split)]
            offers = [d.propose(outs[0].head_RH, 5) for d in (whole, split)]
        assert torch.equal(offers[0].token_RK, offers[1].token_RK), name
        errors = [(a - b).abs().max() for a, b in zip(*outs, strict=True)]
        errors.append((offers[0].logp_RK - offers[1].logp_RK).abs().max())
        found[name] = float(max(errors))
    return found


def packing(ranks: Ranks) -> dict[str, Any]:
    """Ids with and without packed CPU weights, and how many shares were packed."""
    found: dict[str, Any] = {}
    for is_on in ("1", "0"):
        os.environ["EAGLE4_PACK_WEIGHTS"] = is_on
        target = zoo.build("llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=2)
        model = Eagle4ForCausalLM(target, small_drafter(target)).shard(ranks)
        ids = torch.tensor([[3, 5, 7]])
        out = model.generate(ids, max_new_tokens=6, do_sample=False, speculative="eagle4")
        found[is_on] = out.tolist()
        packed = (model.adapter._packed, model._packed)
        found[f"packed {is_on}"] = [len(part._packed) for part in packed if part is not None]
    return found


def compiled(ranks: Ranks) -> dict[str, Any]:
    """Compiled rounds of a split pair: ids, graphs after the first call and after more of them."""
    target = zoo.build("llama", vocab_size=24)
    eager = Eagle4ForCausalLM(target, small_drafter(target)).shard(ranks)
    model = Eagle4ForCausalLM(
        zoo.build("llama", vocab_size=24), small_drafter(target), compile="on"
    ).shard(ranks)
    speculative = {"max_depth": 3, "top_k": 3, "max_nodes": 8, "harness": False}
    ids, wanted, graphs = [], [], []
    for length in (5, 9, 6):
        inputs = prompt([length], vocab=24)
        for own, found in ((model, ids), (eager, wanted)):
            kwargs = {"max_new_tokens": 8, "do_sample": False, "speculative": speculative}
            found.append(own.generate(**inputs, **kwargs).tolist())
        graphs.append(num_compiled())
    parts = model.graphs().blocks, model.graphs().draft, model.graphs()._propose
    fails = [part._fails for part in parts]  # type: ignore[union-attr]
    return {"ids": ids, "wanted": wanted, "graphs": graphs, "fails": fails}


def loading(ranks: Ranks, folder: str) -> dict[str, Any]:
    """`from_pretrained(..., tp_size=)`, and what is refused afterwards."""
    found: dict[str, Any] = {}
    model = Eagle4ForCausalLM.from_pretrained(
        f"{folder}/target", f"{folder}/drafter", tp_size=ranks.size, device="cpu"
    )
    ids = torch.tensor([[3, 5, 7]])
    out = model.generate(ids, max_new_tokens=8, speculative="eagle4", do_sample=False)
    found["ids"] = out.tolist()
    for name, call in (
        ("save", lambda: model.save_pretrained(tempfile.gettempdir())),
        ("foreign", lambda: model.generate(ids, do_sample=True, num_beams=1, use_cache=False)),
        ("different", lambda: model.generate(ids + ranks.rank, max_new_tokens=4)),
        ("top-k", lambda: model.generate(ids, do_sample=True, top_k=3 + ranks.rank)),
        ("size", lambda: Eagle4ForCausalLM.from_pretrained(f"{folder}/target", tp_size=3)),
    ):
        try:
            found[name] = call() is None
        except ValueError as error:
            found[name] = str(error)
    twin = copy.deepcopy(model.target)  # as the judge of near ties makes one in fp32
    found["copy"] = torch.equal(twin(ids).logits, model.target(ids).logits)
    taps, last = extract(model.target, [0, 2], torch.arange(2, 12))
    found["taps"] = [taps.tolist(), last.tolist()]
    found["beams"] = model.generate(ids, max_new_tokens=5, num_beams=2, do_sample=False).tolist()
    return found


def leaving_alone(ranks: Ranks) -> str:
    """A rank that has left says so instead of exchanging nonsense."""
    alone = Ranks(dist.new_subgroups(1)[0], "cpu")  # type: ignore[arg-type]
    alone.leave()
    try:
        alone.all_reduce(torch.ones(2), "layers")
    except RankError as error:
        return str(error)
    return "went on"
