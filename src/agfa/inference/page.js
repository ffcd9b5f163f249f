// Sends images to the server that this page is from, and shows what it answers.
"use strict";
const $ = (id) => document.getElementById(id);
const AT_ONCE = 6; // requests: the server makes batches of them
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
  imagine(item);
}

$("picture").addEventListener("load", () => $("picture").classList.toggle("small", $("picture").naturalWidth < 160));
$("picture").addEventListener("error", () => ($("picture").hidden = true));

meet();
