"use strict";
// The page of `edge0 serve`: a conversation through the OpenAI interface, and a picture of /edge0/live beside it.

const at = (id) => document.getElementById(id);
const LETTERS = { r: "reused", a: "read ahead", w: "waited for", n: "being read ahead", "-": "not used", ".": "empty" };
const HISTORY = 160; // tokens
const STOPPED = "you";

// ---- the server ----------------------------------------------------------------------------------------------------

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** The answer of the server, or an Error that says what it said. */
async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the server cannot be reached");
  }
  if (response.ok) return response;
  const text = await response.text();
  let said = text;
  try { said = JSON.parse(text).error.message; } catch { /* not of this server's making */ }
  const error = new Error(said || `the server answers ${response.status}`);
  error.status = response.status;
  throw error;
}

/** The data of server-sent events, parsed, until the stream ends. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// ---- the conversation ----------------------------------------------------------------------------------------------

const talk = { model: null, chat: true, messages: [], running: null };

function show(role, text) {
  at("messages").querySelector(".empty")?.remove();
  const item = document.createElement("div");
  item.className = role;
  const parts = Object.fromEntries(["who", "thought", "said", "cost"].map((name) => {
    const part = document.createElement("span");
    part.className = name;
    return [name, part];
  }));
  parts.who.textContent = role === "user" ? "You" : "Model";
  parts.said.textContent = text;
  item.append(...Object.values(parts));
  at("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return { item, ...parts };
}

function welcome() {
  const item = document.createElement("div");
  item.className = "empty";
  item.textContent = talk.chat
    ? "Write something. Beside the answer you see, token by token, which experts it needs and how they came into memory."
    : "This model has no chat template: it goes on from the text that you write. Beside it you see, token by token, "
      + "which experts it needs and how they came into memory.";
  at("messages").replaceChildren(item);
}

function complain(text) {
  at("problem").textContent = text;
  at("problem").hidden = !text;
}

function body() {
  const shared = {
    model: talk.model, stream: true, stream_options: { include_usage: true },
    max_tokens: Number(at("most").value) || 256, temperature: Number(at("temperature").value) || 0,
  };
  const system = at("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...talk.messages] : talk.messages;
  return talk.chat ? { ...shared, messages } : { ...shared, prompt: messages.map((m) => m.content).join("") };
}

async function ask(question) {
  complain("");
  talk.messages.push({ role: "user", content: question });
  const asked = show("user", question);
  const shown = show("assistant", "");
  shown.item.setAttribute("aria-busy", "true");
  busy(new AbortController());
  let said = "", usage = null, reason = null, failure = "";
  const start = performance.now();
  let first = 0;
  try {
    const path = talk.chat ? "/v1/chat/completions" : "/v1/completions";
    const signal = talk.running.signal;
    const response = await call(path, { method: "POST", body: JSON.stringify(body()), signal });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const delta = choice.delta ?? { content: choice.text };
      if (delta.content || delta.reasoning_content) first ||= performance.now();
      shown.thought.textContent += delta.reasoning_content ?? "";
      said += delta.content ?? "";
      shown.said.textContent = said.trimStart();
      reason = choice.finish_reason ?? reason;
      follow();
    }
  } catch (error) {
    if (error.name === "AbortError") reason = STOPPED;
    else failure = error.message;
  }
  busy(null);
  shown.item.removeAttribute("aria-busy");
  if (said) {
    talk.messages.push({ role: "assistant", content: said });
    shown.cost.textContent = cost(usage, reason, first && first - start);
    follow();
  } else {
    talk.messages.pop();
    asked.item.remove();
    shown.item.remove();
    at("question").value ||= question;
    if (!failure && reason !== STOPPED) failure = "The model ended its answer at once.";
  }
  complain(failure);
}

function cost(usage, reason, milliseconds) {
  const parts = [];
  if (usage) {
    const kept = usage.prompt_tokens_details?.cached_tokens ?? 0;
    const prompt = `prompt of ${usage.prompt_tokens} tokens${kept ? `, ${kept} of them kept` : ""}`;
    parts.push(`${usage.completion_tokens} tokens`, prompt);
  }
  if (milliseconds) parts.push(`first after ${(milliseconds / 1000).toFixed(2)} s`);
  if (reason) parts.push(`ended by ${reason}`);
  return parts.join(" · ");
}

function follow() {
  const list = at("messages");
  if (list.scrollHeight - list.scrollTop - list.clientHeight < 120) list.scrollTop = list.scrollHeight;
}

function busy(controller) {
  talk.running = controller;
  at("send").disabled = Boolean(controller);
  at("stop").disabled = !controller;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = at("question").value;
  if (!question.trim() || talk.running) return;
  at("question").value = "";
  at("question").focus();
  ask(question);
});
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") talk.running?.abort();
});
at("stop").addEventListener("click", () => talk.running?.abort());
at("anew").addEventListener("click", () => {
  talk.running?.abort();
  talk.messages = [];
  complain("");
  welcome();
  at("question").focus();
});
at("key").addEventListener("change", connect);

async function connect() {
  try {
    const [model] = (await (await call("/v1/models")).json()).data;
    talk.model = model.id;
    talk.chat = model.chat ?? true;
    const facts = [model.id, model.backend, model.max_model_len && `${model.max_model_len} tokens of context`];
    at("model").textContent = facts.filter(Boolean).join(" · ");
    complain("");
    if (!talk.messages.length) welcome();
    watch();
  } catch (error) {
    at("model").textContent = "not connected";
    complain(error.status === 401 ? "This server wants its API key: see Settings." : error.message);
    if (error.status === 401) document.querySelector("form details").open = true;
  }
}

// ---- the picture ---------------------------------------------------------------------------------------------------

const live = { token: null, history: [], stream: null, spoken: 0 };

/** Follow /edge0/live while the page can be seen; the server does nothing for it otherwise. */
async function watch() {
  live.stream?.abort();
  if (document.hidden || !talk.model) return;
  const stream = (live.stream = new AbortController());
  let pause = 1000;
  while (!stream.signal.aborted) {
    try {
      const response = await call("/edge0/live", { signal: stream.signal });
      pause = 1000;
      at("now").textContent = "Connected: the next token will be drawn.";
      for await (const event of events(response)) take(event);
    } catch { /* it is tried again */ }
    if (!stream.signal.aborted) at("now").textContent = "Not connected to the server; trying again.";
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(2 * pause, 15000);
  }
}
document.addEventListener("visibilitychange", watch);

function take(event) {
  if (event.prompt) {
    at("now").textContent = `Reading the prompt: ${event.prompt} tokens, layer ${event.layer}.`;
    return;
  }
  const first = event.token === 1;
  const kept = event.cached_tokens ? `, ${event.cached_tokens} of them kept from before` : "";
  at("now").textContent = `Token ${event.token}, after a prompt of ${event.prompt_tokens} tokens${kept}, which took `
    + `${event.first_token_seconds.toFixed(2)} s.`;
  at("memory").textContent = size(event.rss_bytes);
  if (first || !event.layers.length) return; // its costs are those of the prompt
  live.token = event;
  live.history = [...live.history, event].slice(-HISTORY);
  const recent = live.history.slice(-32).filter((past) => past.token <= event.token);
  const mean = (key) => recent.reduce((sum, past) => sum + past[key], 0) / recent.length;
  at("rate").textContent = event.tokens_per_second.toFixed(event.tokens_per_second < 10 ? 2 : 1);
  at("bytes").textContent = size(mean("bytes"));
  at("wait").textContent = `${mean("wait_ms").toFixed(2)} ms`;
  requestAnimationFrame(draw);
  if (performance.now() - live.spoken > 5000) {
    live.spoken = performance.now();
    at("spoken").textContent = summary(event);
  }
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < 3) [bytes, unit] = [bytes / 1024, unit + 1];
  return `${bytes.toFixed(unit && bytes < 100 ? 1 : 0)} ${units[unit]}`;
}

function summary(event) {
  return `Token ${event.token}: ${event.reused} experts reused, ${event.read_ahead} read ahead, `
    + `${event.on_demand} waited for, ${event.wait_ms.toFixed(1)} milliseconds of waiting.`;
}

/** A canvas at the screen's own resolution, cleared; lengths stay those of the page. */
function prepared(canvas) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { pen, width, height };
}

function colors() {
  const style = getComputedStyle(document.documentElement);
  const names = { r: "reused", a: "ahead", w: "waited", n: "ahead", "-": "idle", ".": "empty", ink: "pale" };
  return Object.fromEntries(Object.entries(names).map(([key, name]) => [key, style.getPropertyValue(`--${name}`)]));
}

/** Color and shape: reused is a full square, read ahead one with a notch, waited for a cross, coming an outline. */
function cell(pen, color, letter, x, y, w, h) {
  pen.fillStyle = color["."];
  if (letter === "w" || letter === "n") pen.fillRect(x, y, w, h);
  pen.fillStyle = pen.strokeStyle = color[letter];
  if (letter === "n") {
    pen.lineWidth = Math.min(2, w / 3);
    pen.strokeRect(x + pen.lineWidth / 2, y + pen.lineWidth / 2, w - pen.lineWidth, h - pen.lineWidth);
  } else if (letter === "a" && w > 5) {
    const cut = Math.min(w, h) * 0.45;
    pen.beginPath();
    pen.moveTo(x, y);
    pen.lineTo(x + w - cut, y);
    pen.lineTo(x + w, y + cut);
    pen.lineTo(x + w, y + h);
    pen.lineTo(x, y + h);
    pen.fill();
  } else if (letter === "w" && w > 5) {
    const middle = [x + w / 2, y + h / 2], half = Math.min(w, h) * 0.36;
    pen.lineWidth = Math.max(1.5, half * 0.6);
    pen.beginPath();
    pen.moveTo(middle[0] - half, middle[1] - half);
    pen.lineTo(middle[0] + half, middle[1] + half);
    pen.moveTo(middle[0] + half, middle[1] - half);
    pen.lineTo(middle[0] - half, middle[1] + half);
    pen.stroke();
  } else {
    pen.fillRect(x, y, w, h);
  }
}

const LEFT = 26; // for the numbers of layers

function grid(canvas) {
  const layers = live.token.layers;
  const columns = Math.max(...layers.map(([, letters]) => letters.length));
  return { layers, columns, wide: (canvas.clientWidth - LEFT) / columns, high: canvas.clientHeight / layers.length };
}

function draw() {
  const color = colors();
  for (const canvas of document.querySelectorAll("#legend canvas")) {
    const { pen } = prepared(canvas);
    cell(pen, color, canvas.dataset.letter, 1, 1, 12, 12);
  }
  if (!live.token) return;
  drawSlots(color);
  drawHistory(color);
  at("slots").setAttribute("aria-label", summary(live.token));
  at("history").setAttribute("aria-label", `The last ${live.history.length} tokens. ${summary(live.token)}`);
  if (at("numbers").open) fillTable();
}

function drawSlots(color) {
  const canvas = at("slots");
  const count = live.token.layers.length;
  canvas.style.height = `${Math.max(160, Math.min(24, Math.max(9, 320 / count)) * count)}px`;
  const { pen } = prepared(canvas);
  const { layers, wide, high } = grid(canvas);
  const gap = Math.min(2, wide / 5, high / 5);
  pen.font = "10px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  const every = Math.ceil(12 / high);
  layers.forEach(([layer, letters], row) => {
    pen.fillStyle = color.ink;
    if (row % every === 0) pen.fillText(layer, LEFT - 6, (row + 0.5) * high);
    [...letters].forEach((letter, column) => {
      cell(pen, color, letter, LEFT + column * wide + gap / 2, row * high + gap / 2, wide - gap, high - gap);
    });
  });
}

function drawHistory(color) {
  const { pen, width, height } = prepared(at("history"));
  const step = (width - LEFT) / HISTORY;
  live.history.forEach((event, index) => {
    const all = event.reused + event.read_ahead + event.on_demand || 1;
    let y = height;
    for (const [letter, count] of [["r", event.reused], ["a", event.read_ahead], ["w", event.on_demand]]) {
      const part = (count / all) * height;
      pen.fillStyle = color[letter];
      pen.fillRect(LEFT + index * step, y - part, Math.max(step - 0.5, 0.5), part);
      y -= part;
    }
  });
  pen.fillStyle = color.ink;
  pen.font = "10px system-ui, sans-serif";
  pen.textAlign = "right";
  pen.fillText("all", LEFT - 6, 9);
  pen.fillText("0", LEFT - 6, height - 1);
}

function fillTable() {
  const count = (letters, letter) => [...letters].filter((one) => one === letter).length;
  const rows = live.token.layers.map(([layer, letters, , wait]) => {
    const row = document.createElement("tr");
    const cells = [layer, count(letters, "r"), count(letters, "a"), count(letters, "w"), wait.toFixed(2)];
    cells.forEach((text, column) => {
      const made = document.createElement(column ? "td" : "th");
      if (!column) made.scope = "row";
      made.textContent = text;
      row.append(made);
    });
    return row;
  });
  at("rows").replaceChildren(...rows);
}

at("numbers").addEventListener("toggle", draw);
at("slots").addEventListener("pointermove", (event) => {
  if (!live.token) return;
  const { layers, wide, high } = grid(at("slots"));
  const [layer, letters, experts] = layers[Math.floor(event.offsetY / high)] ?? [];
  const column = Math.floor((event.offsetX - LEFT) / wide);
  const letter = letters?.[column];
  if (!letter) return;
  const nth = [...letters.slice(0, column)].filter((one) => one !== ".").length;
  const expert = letter === "." ? "" : ` expert ${experts[nth]}:`;
  at("pointed").textContent = `layer ${layer}, slot ${column}:${expert} ${LETTERS[letter]}`;
});
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

welcome();
draw();
connect();
