"""Catches: packed CPU weights that are stale, wrong, used where they cannot be, or left behind;
siblings that are answered with each other's part, with an earlier input's, or computed twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eagle4.ops import PackedLinears
from eagle4.ops.packing import PackedLinear

WIDTH = 256

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="packed weights need oneDNN"
)


@pytest.fixture
def model() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(512, 8)
        ).requires_grad_(False)


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(1, 16, WIDTH, generator=torch.Generator().manual_seed(1))


def is_packed(layer: nn.Module) -> bool:
    return isinstance(layer, PackedLinear)


def check(packed: PackedLinears, rows: torch.Tensor) -> None:
    """Packed results are the stock ones; outside nothing is left."""
    expected = packed.model(rows)
    with packed.active():
        assert is_packed(packed.model[0]) and is_packed(packed.model[1])
        found = packed.model(rows)
    assert not any(is_packed(layer) for layer in packed.model)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 7, 16, 33])
def test_results_are_those_of_the_stock_linear(model, count):
    rows = torch.randn(1, count, WIDTH)
    check(PackedLinears(model), rows)
    check(PackedLinears(model), rows.transpose(0, 1))


def test_small_layers_are_left_alone(model):
    with PackedLinears(model).active():
        assert not is_packed(model[2])


def in_place(layer):
    layer.weight.mul_(1.5)


def through_data(layer):
    """What merging a LoRA does; the version counter does not see it."""
    layer.weight.data += 0.01 * torch.randn_like(layer.weight)


def replaced(layer):
    layer.weight = nn.Parameter(torch.randn_like(layer.weight), requires_grad=False)


def new_storage(layer):
    layer.weight.data = torch.randn_like(layer.weight)


def loaded(layer):
    layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()})


def new_bias_of_two_widths(layer):
    layer.bias = nn.Parameter(torch.randn(2 * WIDTH), requires_grad=False)


def new_bias(layer):
    layer.bias = nn.Parameter(torch.randn(WIDTH), requires_grad=False)


@pytest.mark.parametrize(
    "change", [in_place, through_data, replaced, new_storage, loaded, new_bias]
)
def test_a_changed_weight_is_packed_anew(model, rows, change):
    packed = PackedLinears(model)
    check(packed, rows)
    change(model[0])
    check(packed, rows)


def test_unchanged_weights_are_packed_once(model, monkeypatch):
    packed = PackedLinears(model)
    with packed.active():
        first = {name: copy.packed for name, copy in packed._packed.items()}
    with packed.active():
        assert all(copy.packed is first[name] for name, copy in packed._packed.items())


def test_a_replaced_module_is_followed(model, rows):
    packed = PackedLinears(model)
    check(packed, rows)
    model[0] = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    check(packed, rows)


def test_other_dtypes_are_not_packed(model):
    with PackedLinears(model.half()).active():
        assert not any(is_packed(layer) for layer in model)


def test_bfloat16_is_packed_where_the_cpu_multiplies_it(model, rows):
    model, rows = model.bfloat16(), rows.bfloat16()
    exact = model.double()(rows.double())
    model.bfloat16()
    stock = (model(rows).double() - exact).abs().max()
    with PackedLinears(model).active():
        assert is_packed(model[0]) == torch.ops.mkldnn._is_mkldnn_bf16_supported()
        packed = (model(rows).double() - exact).abs().max()
    assert packed <= 2 * stock


def test_the_switch_turns_it_off(model, monkeypatch):
    monkeypatch.setenv("EAGLE4_PACK_WEIGHTS", "0")
    with PackedLinears(model).active():
        assert not any(is_packed(layer) for layer in model)


def test_autocast_keeps_the_stock_kernels(model, rows):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(rows)
        with PackedLinears(model).active():
            assert torch.equal(model(rows), expected)


def test_inference_tensors_are_left_alone(rows):
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        with PackedLinears(model).active():
            assert not is_packed(model[0])


def test_transposed_storage_is_left_alone(model, rows):
    model[0].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t(), requires_grad=False)
    expected = model(rows)
    with PackedLinears(model).active():
        torch.testing.assert_close(model(rows), expected, atol=1e-5, rtol=1e-5)


class Adapted(nn.Linear):
    """A LoRA-like subclass."""

    def forward(self, rows):
        return super().forward(rows) + 1


def test_subclasses_and_patched_linears_are_untouched(model, rows):
    adapted = Adapted(WIDTH, WIDTH).requires_grad_(False)
    stock_forward = nn.Linear.forward

    def patched(rows):
        return stock_forward(model[0], rows) * 2

    model.insert(1, adapted)
    model[0].forward = patched
    expected = model(rows)
    with PackedLinears(model).active():
        assert model[0].forward is patched and not is_packed(adapted) and is_packed(model[2])
        torch.testing.assert_close(model(rows), expected, atol=1e-5, rtol=1e-5)
    assert model[0].forward is patched


class Wrapped(nn.Module):
    """A LoRA layer around a stock linear: the base may be packed, the sum stays."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.low = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH, requires_grad=False)

    def forward(self, rows):
        return self.base_layer(rows) + rows @ self.low


def test_a_wrapped_linear_keeps_its_addition(rows):
    model = Wrapped()
    expected = model(rows)
    with PackedLinears(model).active():
        assert is_packed(model.base_layer)
        torch.testing.assert_close(model(rows), expected, atol=1e-5, rtol=1e-5)


def test_an_exception_inside_leaves_nothing_behind(model):
    with pytest.raises(KeyError), PackedLinears(model).active():
        raise KeyError
    assert not any(is_packed(layer) for layer in model)


def test_nothing_is_packed_when_memory_is_short(model, monkeypatch):
    free = 100_000  # bytes; the weights need more than half of it
    monkeypatch.setattr(
        "eagle4.ops.packing.psutil.virtual_memory", lambda: type("M", (), {"available": free})
    )
    with PackedLinears(model).active():
        assert not any(is_packed(layer) for layer in model)


class Attention(nn.Module):
    """Siblings as models have them, and calls that a model might make."""

    def __init__(self, bias: bool = True, key_bias: bool | None = None):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=bias if key_bias is None else key_bias)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.requires_grad_(False)

    def forward(self, rows):
        return self.q_proj(rows), self.k_proj(rows), self.v_proj(rows)


def same(found, expected):
    for part, stock in zip(found, expected, strict=True):
        torch.testing.assert_close(part, stock, atol=1e-5, rtol=1e-5)


@pytest.fixture
def products(monkeypatch):
    """Shapes of the packed products."""
    shapes = []
    original = PackedLinear._product

    def noted(self, input):
        out = original(self, input)
        shapes.append(tuple(out.shape))
        return out

    monkeypatch.setattr(PackedLinear, "_product", noted)
    return shapes


@pytest.mark.parametrize("bias", [True, False])
def test_siblings_share_one_product(rows, products, bias):
    model = Attention(bias)
    expected = model(rows)
    with PackedLinears(model).active():
        same(model(rows), expected)
        same(model(rows), expected)  # the same tensor again is another call
    assert products == [(1, 16, 4 * WIDTH)] * 2
    assert not any(is_packed(layer) or "shared" in layer.__dict__ for layer in model.children())


def test_siblings_may_be_called_in_any_order_and_with_any_input(rows):
    model, other = Attention(), rows.roll(1, dims=1)
    with PackedLinears(model).active():
        found = model.v_proj(rows), model.k_proj(rows), model.q_proj(other), model.v_proj(rows)
        again = model.k_proj(other), model.k_proj(other), model.q_proj(rows)
    same(found, (model.v_proj(rows), model.k_proj(rows), model.q_proj(other), model.v_proj(rows)))
    same(again, (model.k_proj(other), model.k_proj(other), model.q_proj(rows)))


def test_nothing_is_kept_once_the_last_sibling_has_its_part(rows):
    model = Attention()
    with PackedLinears(model).active():
        model(rows)
        assert model.q_proj.shared == [None, ()]


def test_siblings_that_differ_stay_apart(rows, products):
    model = Attention(bias=True, key_bias=False)
    expected = model(rows)
    with PackedLinears(model).active():
        same(model(rows), expected)
    assert len(products) == 3


@pytest.mark.parametrize("change", [in_place, through_data, replaced, new_bias_of_two_widths])
def test_a_changed_sibling_is_packed_anew(rows, change):
    model = Attention()
    packed = PackedLinears(model)
    with packed.active():
        model(rows)
    change(model.q_proj)
    expected = model(rows)
    with packed.active():
        same(model(rows), expected)


def test_a_compiled_function_multiplies_once_for_all_siblings(rows):
    models = [Attention(), Attention()]
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    def run(model, rows):
        return model(rows)

    with torch.no_grad(), PackedLinears(nn.ModuleList(models)).active():
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        found = [compiled(model, rows) for model in models]
    assert len(graphs) == 1 and graphs[0].count(torch.ops.eagle4.packed_linear) == 1
    for model, parts in zip(models, found, strict=True):
        same(parts, model(rows))
