// Draws the worst domain that the model imagined for an image, mixed in as strongly as the slider says.
// Images and amplitudes are linear in the strength, so they are mixed here; only what the model says is asked for.
"use strict";
const STEPS = 20; // of the slider, and of what the server judges

async function imagine(item) {
  $("worst").hidden = false;
  $("stage").hidden = !item.imagined;
  $("survives").className = "";
  if (!model.imagines) {
    $("survives").textContent =
      "This model imagines none: it was trained by another method than AGFA, or its generator is not beside it.";
    return;
  }
  if (!item.imagined) {
    $("survives").textContent = "Imagining…";
    try {
      item.asked ??= patiently("imagine", form("image", item.file)).then(unpacked);
      item.imagined = await item.asked;
    } catch (error) {
      item.asked = null;
      if (chosen === item) $("survives").textContent = error.message;
      return;
    }
    if (chosen !== item) return;
  }
  const { judged, trained, draws, holds } = item.imagined;
  const first = judged[0].label;
  const lost = judged.find((said) => said.label !== first);
  $("survives").className = lost ? "falls" : "holds";
  $("survives").textContent = lost
    ? `The decision changes at ${round(lost.strength)}: ${first} becomes ${lost.label}.`
    : `The decision holds at every strength: ${first}.`;
  $("note").textContent =
    `${lost ? "Shaded: the decision has changed. " : ""}Of ${draws} domains drawn from its generator this is the hardest for your image. The decision holds in ` +
    `${holds} of the ${draws} at ${round(trained)}, the largest strength it was trained with. ` +
    "Amplitudes carry style, phases carry shape: only the amplitudes are changed.";
  $("stage").hidden = false;
  $("strength").value = Math.round((trained * STEPS) / 2); // what training showed it on average
  still(item.imagined);
  slide();
}

// Bytes of base64, and the numbers that they stand for.
const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const numbers = ({ low, high, bytes: text }) => Float32Array.from(bytes(text), (step) => low + ((high - low) * step) / 255);

function unpacked(said) {
  for (const key of ["original", "generated", "amplitude", "generated_amplitude", "phase"]) said[key] = numbers(said[key]);
  for (const key of ["amplitude", "generated_amplitude"]) said[key] = said[key].map(Math.expm1);
  return said;
}

const colours = { viridis: bytes(document.body.dataset.viridis), twilight: bytes(document.body.dataset.twilight) };

function paint(canvas, size, colour) {
  canvas.width = canvas.height = size;
  canvas.classList.toggle("small", size < 100);
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  for (let i = 0; i < size * size; i += 1) {
    const [red, green, blue] = colour(i);
    image.data.set([red, green, blue, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
}

function paintImage(canvas, { size, channels }, value) {
  const plane = size * size;
  paint(canvas, size, (i) => [0, 1, 2].map((c) => 255 * value(i + plane * Math.min(c, channels - 1))));
}

function paintScale(canvas, size, table, value) {
  paint(canvas, size, (i) => {
    const step = 3 * Math.max(0, Math.min(255, Math.round(255 * value(i))));
    return table.subarray(step, step + 3);
  });
}

function amplitudeScale({ amplitude, generated_amplitude }) {
  let [low, high] = [Infinity, -Infinity];
  for (const values of [amplitude, generated_amplitude]) {
    for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  [low, high] = [Math.log1p(low), Math.log1p(high)];
  return (value) => (Math.log1p(value) - low) / (high - low || 1);
}

// What does not change with the strength.
function still(said) {
  const { size, original, amplitude, phase } = said;
  said.scale ??= amplitudeScale(said);
  paintImage($("original"), said, (i) => original[i]);
  paintScale($("amplitude"), size, colours.viridis, (i) => said.scale(amplitude[i]));
  for (const id of ["phase", "same-phase"]) {
    paintScale($(id), size, colours.twilight, (i) => phase[i] / (2 * Math.PI) + 0.5);
  }
}

function slide() {
  const said = chosen.imagined;
  const step = Number($("strength").value);
  const l = step / STEPS;
  const { size, original, generated, amplitude, generated_amplitude, judged } = said;
  paintImage($("mixed"), said, (i) => (1 - l) * original[i] + l * generated[i]);
  paintScale($("mixed-amplitude"), size, colours.viridis, (i) =>
    said.scale((1 - l) * amplitude[i] + l * generated_amplitude[i])
  );
  for (const place of document.querySelectorAll(".strength")) place.textContent = round(l);
  const at = judged[step];
  const kept = at.label === judged[0].label;
  $("now").replaceChildren(`At ${round(l)}: `, strong(at.label), ` ${percent(at.probability)}`);
  if (!kept) $("now").append(`, no longer ${judged[0].label}`);
  $("strength").setAttribute("aria-valuetext", `${round(l)}: ${at.label}, ${percent(at.probability)}, ${kept ? "the decision holds" : "the decision has changed"}`);
  chart(said, step);
}

function strong(text) {
  const element = document.createElement("strong");
  element.textContent = text;
  return element;
}

// Probability against strength, of the decision and of what it becomes, or nearly does; its ends are under the slider's.
function chart({ judged, trained }, step) {
  const [width, height, side, top, bottom] = [$("chart").clientWidth, 180, 9, 16, 8];
  const first = judged[0].label;
  const second = rival(judged, first);
  const names = second ? [[second, "second"], [first, "first"]] : [[first, "first"]];
  const x = (i) => side + ((width - 2 * side) * i) / STEPS;
  const y = (share) => top + (height - top - bottom) * (1 - share);
  const svg = element("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const upright = (kind, at) => svg.append(element("line", { class: kind, x1: at, x2: at, y1: y(1), y2: y(0) }));
  const word = (kind, text, place) => {
    const label = element("text", { class: kind, ...place });
    label.textContent = text;
    svg.append(label);
  };
  const half = (x(1) - x(0)) / 2;
  judged.forEach((said, i) => {
    const [from, to] = [Math.max(x(i) - half, side), Math.min(x(i) + half, width - side)];
    if (said.label !== first) {
      svg.append(element("rect", { class: "lost", x: from, y: y(1), width: to - from + 0.5, height: y(0) - y(1) }));
    }
  });
  for (const share of [0, 0.5, 1]) {
    svg.append(element("line", { class: "grid", x1: side, x2: width - side, y1: y(share), y2: y(share) }));
    if (share) word("scale", round(share), { x: side, y: y(share) - 4 });
  }
  if (trained < 1) upright("trained", x(trained * STEPS));
  upright("cursor", x(step));
  for (const [name, kind] of names) {
    const points = judged.map((said, i) => `${x(i)},${y(said.probabilities[name])}`).join(" ");
    svg.append(element("polyline", { class: kind, points }));
  }
  // The names stand above their lines' ends, the lower one below where there is no room between them.
  const ends = names.map(([name, kind]) => [judged[STEPS].probabilities[name], name, kind]).sort((a, b) => b[0] - a[0]);
  ends.forEach(([share, name, kind], i) => {
    const crowded = i === 1 && y(share) - y(ends[0][0]) < 18;
    const height = crowded ? Math.min(y(share) + 16, y(0) - 2) : Math.max(y(share) - 6, y(1) + 12);
    word(`${kind}-name`, name, { x: width - side - 4, y: crowded && height < y(share) + 10 ? y(share) - 24 : height, "text-anchor": "end" });
  });
  $("chart").replaceChildren(svg);
  const [from, to] = [judged[0], judged[STEPS]].map((said) => percent(said.probabilities[first]));
  $("chart").setAttribute("aria-label", `Probability against strength: ${first} goes from ${from} to ${to}.`);
}

// The class that the decision becomes most often; if it never changes, the one that comes nearest.
function rival(judged, first) {
  const named = (name) => judged.filter((said) => said.label === name).length;
  const best = (name) => Math.max(...judged.map((said) => said.probabilities[name]));
  const others = Object.keys(judged[0].probabilities).filter((name) => name !== first);
  return others.sort((a, b) => named(b) - named(a) || best(b) - best(a))[0];
}

function element(kind, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

$("strength").addEventListener("input", slide);
new ResizeObserver(() => chosen?.imagined && !$("stage").hidden && chart(chosen.imagined, Number($("strength").value))).observe($("chart"));
