"""Spectra against numpy's full complex FFT with angles, in float64, as the paper writes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from agfa.nn.spectrum import NEGLIGIBLE, central_window, decompose, mix_amplitude, recompose, symmetric

Array = NDArray[np.float64]
KINDS = ["random", "constant", "black", "striped", "chequered", "pixel"]
EVERY_SIZE = [(1, 1), (1, 2), (2, 1), (1, 7), (8, 1), (2, 2), (3, 4), (4, 3), (5, 5), (8, 8), (16, 17), (17, 16)]


def image(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    rng = np.random.default_rng(seed)
    rows, columns = np.indices(shape[-2:])
    period = int(rng.integers(1, 4))
    made = {
        "random": lambda: rng.random(shape),
        "constant": lambda: np.full(shape, rng.random()),
        "black": lambda: np.zeros(shape),
        "striped": lambda: np.broadcast_to((columns // period) % 2, shape) * 0.7,
        "chequered": lambda: np.broadcast_to((rows + columns) % 2, shape) * 1.0,
        "pixel": lambda: np.where((rows == shape[-2] // 3) & (columns == shape[-1] // 2), 0.9, np.zeros(shape)),
    }[kind]()
    return torch.tensor(np.array(made), dtype=dtype)


def amplitude(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any half amplitude for images of `shape`, not yet symmetric."""
    half = (*shape[:-1], shape[-1] // 2 + 1)
    return torch.tensor(np.random.default_rng(seed + 1).exponential(1.0, half), dtype=dtype)


def full_spectrum(x: Tensor) -> tuple[Array, Array]:
    spectrum = np.fft.fft2(x.numpy().astype(np.float64), norm="ortho")
    return np.abs(spectrum), np.angle(spectrum)


def unfold(half: Array, width: int) -> Array:
    """The full amplitude of a half one: A[-u, -v] = A[u, v], by explicit indices."""
    height = half.shape[-2]
    full = np.empty((*half.shape[:-1], width))
    for v in range(width):
        for u in range(height):
            full[..., u, v] = half[..., u, v] if v <= width // 2 else half[..., -u % height, width - v]
    return full


def noise(*arrays: Array, dtype: torch.dtype) -> Array:
    """Rounding of a transform: a few units in the last place of the whole channel's length."""
    length = sum(np.sqrt(np.square(a).sum((-2, -1), keepdims=True)) for a in arrays)
    return np.asarray(16 * torch.finfo(dtype).eps * length)


cases = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "shape": st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 17), st.integers(1, 17)),
        "dtype": st.sampled_from([torch.float32, torch.float64]),
        "seed": st.integers(0, 10_000),
    }
)


@given(cases)
@settings(deadline=None, max_examples=60)
def test_recomposing_what_was_decomposed_gives_the_image_back(case):
    x = image(**case)
    back = recompose(*decompose(x), x.shape[-2:])
    assert back.dtype == x.dtype
    rounding = noise(full_spectrum(x)[0], dtype=x.dtype)
    # what is inaudible comes back with phase 0: at most NEGLIGIBLE of the largest amplitude
    lost = 2 * NEGLIGIBLE * full_spectrum(x)[0].max((-2, -1), keepdims=True) if x.dtype == torch.float64 else 0
    assert (np.abs(back.numpy() - x.numpy()) <= 4 * rounding + lost).all()


@given(cases)
@settings(deadline=None, max_examples=60)
def test_half_spectrum_is_the_half_of_the_full_one(case):
    x = image(**case)
    got, phasor = decompose(x)
    width = x.shape[-1] // 2 + 1
    wanted, phase = (part[..., :width] for part in full_spectrum(x))
    rounding = noise(wanted, dtype=x.dtype)
    assert (np.abs(got.numpy() - wanted) <= rounding).all()
    largest = wanted.max((-2, -1), keepdims=True)
    audible = wanted > 2 * NEGLIGIBLE * largest + rounding
    error = np.abs(phasor.numpy() - np.exp(1j * phase))
    assert (error * wanted <= 2 * rounding)[audible].all()
    np.testing.assert_allclose(np.abs(phasor.numpy()), 1, atol=4e-7)
    quiet = wanted < NEGLIGIBLE * largest / 2 - rounding
    assert (phasor.numpy()[quiet] == 1).all()


@given(cases, st.floats(0, 1))
@settings(deadline=None, max_examples=80)
def test_mixed_image_has_the_mixed_amplitude_and_the_phase_of_its_source(case, strength):
    x = image(**case)
    generated = symmetric(amplitude(case["shape"], case["dtype"], case["seed"]), x.shape[-1])
    x_t = mix_amplitude(x, generated, strength)

    a_s, phase = full_spectrum(x)
    a_g = unfold(generated.numpy().astype(np.float64), x.shape[-1])
    wanted = strength * a_g + (1 - strength) * a_s
    got = np.fft.fft2(x_t.numpy().astype(np.float64), norm="ortho")

    rounding = noise(a_s, a_g, dtype=x.dtype)
    largest = a_s.max((-2, -1), keepdims=True)
    assert (np.abs(np.abs(got) - wanted) <= rounding + 2 * NEGLIGIBLE * largest).all()

    # a phase is known as well as its amplitude stands out of the rounding of the source's spectrum
    own = noise(a_s, dtype=x.dtype)
    audible = a_s > 2 * NEGLIGIBLE * largest + own
    unsure = 2 * a_g * own / np.where(audible, a_s, 1)
    assert (np.abs(got - wanted * np.exp(1j * phase)) <= rounding + unsure)[audible].all()


@given(cases, st.floats(0, 1))
@settings(deadline=None, max_examples=40)
def test_mixing_images_is_mixing_amplitudes(case, strength):
    x = image(**{**case, "dtype": torch.float64})
    generated = symmetric(amplitude(case["shape"], torch.float64, case["seed"]), x.shape[-1])
    a_s, phasor = decompose(x)
    by_amplitude = recompose(strength * generated + (1 - strength) * a_s, phasor, x.shape[-2:])
    # 1e-6 of the largest amplitude is without its phase
    atol = 4 * NEGLIGIBLE * float(a_s.max()) * max(1, x.shape[-2] * x.shape[-1]) ** 0.5 + 1e-12
    torch.testing.assert_close(mix_amplitude(x, generated, strength), by_amplitude, atol=atol, rtol=0)


@pytest.mark.parametrize("size", EVERY_SIZE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phasor_is_plus_or_minus_one_at_the_self_mirrored_corners(size, kind, dtype):
    _, phasor = decompose(image(kind, (2, 3, *size), dtype, seed=3) - 0.3)
    height, width = size
    for u in {0, height // 2} if height % 2 == 0 else {0}:
        for v in {0, width // 2} if width % 2 == 0 else {0}:
            corner = phasor[..., u, v]
            assert (corner.imag == 0).all()
            assert (corner.real.abs() == 1).all()


@pytest.mark.parametrize("size", EVERY_SIZE)
def test_self_mirrored_columns_of_the_phasor_are_exactly_hermitian(size):
    height, width = size
    _, phasor = decompose(image("random", (1, 3, *size), torch.float32, seed=5))
    for v in {0, width // 2} if width % 2 == 0 else {0}:
        for u in range(height):
            assert torch.equal(phasor[..., u, v], phasor[..., -u % height, v].conj().resolve_conj())


@pytest.mark.parametrize("size", EVERY_SIZE)
def test_symmetric_amplitude_is_even_where_a_column_is_its_own_mirror(size):
    height, width = size
    given = amplitude((2, 3, *size), torch.float64, seed=1)
    before = given.clone()
    made = symmetric(given, width)
    assert torch.equal(given, before)  # nothing in place
    edges = {0, width // 2} if width % 2 == 0 else {0}
    for v in range(width // 2 + 1):
        for u in range(height):
            wanted = (given[..., u, v] + given[..., -u % height, v]) / 2 if v in edges else given[..., u, v]
            torch.testing.assert_close(made[..., u, v], wanted)
    torch.testing.assert_close(symmetric(made, width), made)


@pytest.mark.parametrize("size", EVERY_SIZE)
@pytest.mark.parametrize("kind", KINDS)
def test_image_of_an_amplitude_is_that_of_the_symmetrised_one(size, kind):
    x = image(kind, (2, 2, *size), torch.float64, seed=2)
    given = amplitude((2, 2, *size), torch.float64, seed=2)
    _, phasor = decompose(x)
    plain = recompose(given, phasor, size)
    torch.testing.assert_close(recompose(symmetric(given, size[1]), phasor, size), plain, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["striped", "chequered", "constant"])
@pytest.mark.parametrize("size", [(16, 16), (15, 14), (12, 17)])
def test_rounding_noise_is_given_no_phase_of_its_own(kind, size):
    """Where the source has no amplitude the phase is 0 in any precision, not that of amplified rounding."""
    x = image(kind, (1, 3, *size), torch.float64, seed=4)
    generated = symmetric(amplitude((1, 3, *size), torch.float64, seed=4), size[1])
    single = mix_amplitude(x.float(), generated.float(), 0.8)
    torch.testing.assert_close(single.double(), mix_amplitude(x, generated, 0.8), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["random", "black", "striped"])
@pytest.mark.parametrize("size", [(4, 4), (3, 5), (1, 6)])
def test_gradient_to_the_generated_amplitude(kind, size):
    x = image(kind, (2, 1, *size), torch.float64, seed=6)
    strength = torch.tensor([0.3, 0.9], dtype=torch.float64).view(2, 1, 1, 1)
    raw = amplitude((2, 1, *size), torch.float64, seed=6).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: mix_amplitude(x, symmetric(a, size[1]), strength), raw, fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_to_the_images_is_that_of_their_own_share_and_nothing_through_the_phase(kind):
    x = image(kind, (2, 3, 6, 5), torch.float32, seed=7).requires_grad_()
    weight = torch.randn(2, 3, 6, 5)
    generated = symmetric(amplitude((2, 3, 6, 5), torch.float32, seed=7), 5).requires_grad_()
    (mix_amplitude(x, generated, 0.25) * weight).sum().backward()
    torch.testing.assert_close(x.grad, 0.75 * weight)
    assert generated.grad.isfinite().all()


def test_strength_is_one_number_per_image():
    x = image("random", (3, 2, 6, 7), torch.float64, seed=8)
    generated = symmetric(amplitude((3, 2, 6, 7), torch.float64, seed=8), 7)
    strengths = [0.0, 0.4, 1.0]
    together = mix_amplitude(x, generated, torch.tensor(strengths, dtype=torch.float64).view(3, 1, 1, 1))
    for i, strength in enumerate(strengths):
        torch.testing.assert_close(together[i], mix_amplitude(x[i : i + 1], generated[i : i + 1], strength)[0])
    torch.testing.assert_close(together[0], x[0])


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_leaves_everything_in_float32(given):
    x = image("random", (2, 3, 8, 8), torch.float32, seed=9).to(given)
    generated = symmetric(amplitude((2, 3, 8, 8), torch.float32, seed=9), 8)
    plain = mix_amplitude(x, generated, 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        got, phasor = decompose(x)
        cast = mix_amplitude(x, generated, 0.5)
    assert (got.dtype, phasor.dtype, cast.dtype) == (torch.float32, torch.complex64, torch.float32)
    assert torch.equal(cast, plain)


@pytest.mark.parametrize("ratio", [1.0, 0.9, 0.5, 0.1, 0.0])
@pytest.mark.parametrize("size", EVERY_SIZE)
def test_central_window_is_the_shifted_crop_as_much_of_u_as_of_minus_u(size, ratio):
    crop = [int(n * np.sqrt(ratio)) for n in size]
    corner = [n // 2 - c // 2 for n, c in zip(size, crop, strict=True)]
    full = np.zeros(size)
    full[corner[0] : corner[0] + crop[0], corner[1] : corner[1] + crop[1]] = 1
    full = np.fft.ifftshift(full)
    mirrored = np.array([[full[-u, -v] for v in range(size[1])] for u in range(size[0])])
    found = unfold(central_window(size, ratio).double().numpy(), size[1])
    np.testing.assert_array_equal(found, (full + mirrored) / 2)
    assert found.all() == (ratio == 1)
