// Sends images to the server that this page is from, and shows what it answers.
"use strict";
const $ = (id) => document.getElementById(id);
const AT_ONCE = 6; // requests: the server makes batches of them
const STEPS = 20; // of the slider
const round = (share) => `${Math.round(100 * share)}\u00a0%`;
const percent = (share) => (share > 0.995 && share < 1 ? ">99\u00a0%" : share < 0.005 && share > 0 ? "<1\u00a0%" : round(share));
const items = [];
let model = null;
let token = sessionStorage.getItem("token");
let chosen = null;
let busy = 0;
let edition = 0; // what is answered to a list that was cleared is of no use

// ---- the server

async function ask(path, body) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", body, headers });
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  if (response.status === 401) $("token").hidden = false;
  if (response.ok) return response.json();
  const said = await response.json().catch(() => ({}));
  throw Object.assign(new Error(said.error || `The server answered ${response.status}.`), { status: response.status });
}

async function patiently(path, body) {
  for (let wait = 500; ; wait *= 2) {
    try {
      return await ask(path, body);
    } catch (error) {
      if (error.status !== 503 || wait > 20000) throw error;
      await new Promise((go) => setTimeout(go, wait));
    }
  }
}

const form = (field, file) => {
  const data = new FormData();
  data.append(field, file, file.name);
  return data;
};

async function meet() {
  try {
    model = await ask("model");
  } catch (error) {
    $("about").textContent = error.status === 401 ? "" : error.message;
    return;
  }
  $("token").hidden = true;
  $("about").textContent =
    `${model.algorithm} with ${model.backbone}, learnt on ${model.sources.join(", ")}. ` +
    `It knows ${model.classes.length} classes: ${model.classes.slice(0, 12).join(", ")}${model.classes.length > 12 ? ", …" : ""}.`;
  pump();
}

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  token = $("secret").value;
  sessionStorage.setItem("token", token);
  meet();
});

// ---- images in

function take(files) {
  notice("");
  const before = items.length;
  for (const file of files) {
    const item = { file, state: "waiting", url: URL.createObjectURL(file) };
    items.push(item);
    $("list").append(card(item));
    if (model && file.size > model.largest_request - 4096) {
      fail(item, `Larger than ${Math.floor(model.largest_request / 2 ** 20)} MB`);
    }
  }
  const fresh = items.slice(before).find((item) => item.state === "waiting") ?? items[before];
  if (fresh && (!chosen || chosen.state === "failed")) choose(fresh);
  pump();
}

function pump() {
  while (model && busy < AT_ONCE) {
    const item = items.find((each) => each.state === "waiting");
    if (!item) break;
    item.state = "asked";
    busy += 1;
    const mine = edition;
    patiently("predict", form("images", item.file))
      .then((said) => mine === edition && done(item, said.predictions[0]))
      .catch((error) => {
        if (mine !== edition) return;
        if (error.status === 401) item.state = "waiting";
        else fail(item, error.message);
      })
      .finally(() => {
        busy -= 1;
        if ($("token").hidden) pump();
      });
  }
  progress();
}

function done(item, answer) {
  item.state = "done";
  item.answer = answer;
  item.said.textContent = answer.label;
  item.sure.textContent = answer.abstain ? "unsure" : percent(answer.probability);
  item.card.setAttribute("aria-busy", "false");
  if (chosen === item) show();
}

function fail(item, message) {
  item.state = "failed";
  const why = message.replace(`${item.file.name}: `, "");
  item.error = why[0].toUpperCase() + why.slice(1);
  item.card.classList.add("failed");
  item.card.setAttribute("aria-busy", "false");
  item.said.textContent = item.error;
  item.sure.remove();
  if (chosen === item) choose(items.find((each) => each.state !== "failed") ?? item);
}

function progress() {
  const failed = items.filter((item) => item.state === "failed").length;
  const answered = items.filter((item) => item.state === "done").length;
  $("count").hidden = !items.length;
  const all = items.length === 1 ? "1 image" : `${items.length} images`;
  const left = items.length - answered - failed;
  $("progress").textContent = (left ? `${answered} of ${all}` : all) + (failed ? `, ${failed} not read` : "");
}

function card(item) {
  const entry = document.createElement("li");
  const button = document.createElement("button");
  const thumb = document.createElement("img");
  const [said, sure, file] = ["said", "sure", "file"].map((kind) => {
    const span = document.createElement("span");
    span.className = kind;
    return span;
  });
  button.type = "button";
  button.tabIndex = -1; // the chosen one alone is on the way of the Tab key; arrows reach the others
  thumb.className = "thumb";
  thumb.alt = "";
  thumb.addEventListener("error", () => thumb.replaceWith(blank())); // a kind that browsers do not draw, or no image
  thumb.src = item.url;
  said.textContent = "…";
  file.textContent = item.file.name;
  button.append(thumb, said, sure, file);
  button.addEventListener("click", () => choose(item));
  entry.append(button);
  entry.setAttribute("aria-busy", "true");
  Object.assign(item, { card: entry, said, sure });
  return entry;
}

const blank = () => Object.assign(document.createElement("span"), { className: "thumb" });

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

$("choose").addEventListener("click", () => $("files").click());
for (const id of ["files", "shot"]) {
  $(id).addEventListener("change", () => {
    take([...$(id).files]);
    $(id).value = "";
  });
}
$("clear").addEventListener("click", () => {
  edition += 1;
  for (const item of items) URL.revokeObjectURL(item.url);
  items.length = 0;
  $("list").replaceChildren();
  chosen = null;
  show();
  progress();
  $("choose").focus();
});
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("drop").classList.add("over");
  });
}
document.addEventListener("dragleave", (event) => event.relatedTarget || $("drop").classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").classList.remove("over");
  take([...event.dataTransfer.files]);
});
document.addEventListener("paste", (event) => take([...event.clipboardData.files]));

// ---- the camera

let stream = null;
$("camera").addEventListener("click", async () => {
  notice("");
  if (!navigator.mediaDevices) return $("shot").click(); // browsers give cameras to https and this machine alone
  try {
    stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
  } catch (error) {
    const why = { NotAllowedError: "This browser was not allowed to use the camera", NotFoundError: "No camera was found" };
    return notice(`${why[error.name] || "The camera cannot be used"}. Choose an image instead.`);
  }
  $("view").srcObject = stream;
  $("booth").showModal();
  await $("view").play();
});
$("snap").addEventListener("click", () => {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [$("view").videoWidth, $("view").videoHeight];
  canvas.getContext("2d").drawImage($("view"), 0, 0);
  canvas.toBlob((blob) => blob && take([new File([blob], "camera.png", { type: "image/png" })]), "image/png");
  $("booth").close();
});
$("leave").addEventListener("click", () => $("booth").close());
$("booth").addEventListener("close", () => stream && stream.getTracks().forEach((track) => track.stop()));

// ---- the chosen image

function choose(item) {
  if (chosen) {
    chosen.card.removeAttribute("aria-current");
    chosen.card.firstChild.tabIndex = -1;
  }
  chosen = item;
  item.card.setAttribute("aria-current", "true");
  item.card.firstChild.tabIndex = 0;
  show();
}

$("list").addEventListener("keydown", (event) => {
  const at = items.indexOf(chosen);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (!items[to]) return;
  event.preventDefault();
  choose(items[to]);
  items[to].card.firstChild.focus();
});

function show() {
  const item = chosen;
  $("empty").hidden = Boolean(item);
  $("answer").hidden = !item;
  $("worst").hidden = true;
  if (!item) return;
  $("picture").src = item.url;
  $("picture").alt = item.file.name;
  $("name").textContent = item.file.name;
  $("doubt").textContent = "";
  $("classes").replaceChildren();
  document.querySelector(".verdict").classList.toggle("failed", item.state === "failed");
  if (item.state !== "done") {
    $("label").textContent = item.state === "failed" ? item.error : "…";
    $("picture").hidden = item.state === "failed";
    return;
  }
  $("picture").hidden = false;
  const { label, probability, probabilities, disagreement, abstain } = item.answer;
  const sure = document.createElement("small");
  sure.textContent = percent(probability);
  $("label").replaceChildren(label, " ", sure);
  $("doubt").textContent =
    (abstain ? "The model is not sure enough to decide. " : "") +
    (disagreement === null ? "" : `Two classifiers drawn from its posterior disagree ${percent(disagreement)} of the time.`);
  const order = Object.entries(probabilities).sort((a, b) => b[1] - a[1]);
  for (const [name, share] of order.slice(0, 7)) {
    const line = document.createElement("li");
    const bar = document.createElement("span");
    bar.className = "bar";
    bar.style.width = `${100 * share}%`;
    const [left, right] = [name, percent(share)].map((text) => {
      const span = document.createElement("span");
      span.textContent = text;
      return span;
    });
    line.append(bar, left, right);
    $("classes").append(line);
  }
  picture();
}

$("picture").addEventListener("load", () => $("picture").classList.toggle("small", $("picture").naturalWidth < 160));
$("picture").addEventListener("error", () => ($("picture").hidden = true));

// ---- the worst case

async function picture() {
  const item = chosen;
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
      item.imagined = unpacked(await patiently("imagine", form("image", item.file)));
    } catch (error) {
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
meet();
