// The status page: draws what /dashboard/events tells, and talks to /v1/chat/completions. Nothing else is asked for.
"use strict";

const $ = (id) => document.getElementById(id);
const RETRY_MS = 2000;
const HISTORY = 120; // frames in a spark line
const GAP = 0.16; // of a cell
const FADE_MS = 900;
const KEY = "pagemill-key";
const WORDS = {
  400: "Bad request", 401: "No valid key", 403: "Not allowed", 404: "Not found", 405: "Wrong method", 408: "Too slow",
  413: "Too large", 422: "Not understood", 429: "Too many requests", 431: "Head too large", 499: "Client left",
  500: "Failed", 503: "Not serving",
};

let key = sessionStorage.getItem(KEY) || "";
const headers = () => (key ? { Authorization: `Bearer ${key}` } : {});

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function say(id, text) {
  const place = $(id);
  if (place.textContent !== text) place.textContent = text;
}

// -- events

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    kept += value;
    const parts = kept.split("\n\n");
    kept = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

async function watch() {
  if (!key && "keys" in document.documentElement.dataset) await askForKey("");
  for (;;) {
    try {
      const response = await fetch("dashboard/events", { headers: headers(), cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        await askForKey(key ? (response.status === 401 ? "This key is not known." : "This key may not look at the status.") : "");
        continue;
      }
      if (response.ok) {
        for await (const data of eventsOf(response)) show(JSON.parse(data));
        showPhase("ended");
      } else showPhase(response.status === 429 ? "too many viewers" : "not serving");
    } catch (error) {
      if (!(error instanceof TypeError)) console.error(error); // a TypeError: the network's
      showPhase("lost");
    }
    await new Promise((done) => setTimeout(done, RETRY_MS));
  }
}

function askForKey(told) {
  $("door-error").textContent = told;
  if (!$("door").open) $("door").showModal();
  $("key").focus();
  return new Promise((done) => {
    $("door-form").onsubmit = (event) => {
      event.preventDefault();
      key = $("key").value.trim();
      sessionStorage.setItem(KEY, key);
      $("door").close();
      done();
    };
  });
}
$("door").addEventListener("cancel", (event) => event.preventDefault());

// -- numbers

const round = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const count = (value) => (value === null ? "–" : value < 9.95 && value > 0 ? round(value, 1) : round(value));
const percent = (value) => (value === null ? "–" : `${round(100 * value, value > 0 && value < 0.1 ? 1 : 0)} %`);

function time(seconds) {
  if (seconds === null) return "–";
  if (seconds < 1) return `${round(1000 * seconds, seconds < 0.00995 ? 1 : 0)} ms`;
  return seconds < 100 ? `${round(seconds, seconds < 9.95 ? 1 : 0)} s` : ago(seconds);
}

function ago(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 86400 ? `${round(seconds / 3600, 1)} h` : `${round(seconds / 86400, 1)} d`;
}

function bytes(number) {
  const step = Math.min(4, Math.floor(Math.log2(Math.max(number, 1)) / 10));
  return `${round(number / 2 ** (10 * step), step > 2 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
}

class Spark {
  constructor(id) {
    this.values = [];
    this.area = $(id).querySelector(".area");
    this.line = $(id).querySelector(".line");
  }
  add(value) {
    this.values.push(value || 0);
    if (this.values.length > HISTORY) this.values.shift();
    const top = Math.max(...this.values, 1);
    const first = HISTORY - this.values.length;
    const points = this.values.map((v, i) => `${(((first + i) * 120) / (HISTORY - 1)).toFixed(1)} ${(31 - (v / top) * 28).toFixed(1)}`);
    const path = `M${points.join("L")}`;
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", `${path}V32H${((first * 120) / (HISTORY - 1)).toFixed(1)}Z`);
  }
}
const sparks = { decode: new Spark("decode-spark"), prompt: new Spark("prompt-spark") };

function showPhase(phase, uptime) {
  document.querySelector(".state").dataset.phase = phase;
  say("phase", phase);
  say("uptime", uptime === undefined ? "" : `up ${ago(uptime)}`);
}

function show(frame) {
  showPhase(frame.phase, frame.uptime);
  const { model, rates, blocks } = frame;
  if (model) {
    const size = model.parameters >= 1e9 ? `${round(model.parameters / 1e9, 1)}B` : `${round(model.parameters / 1e6)}M`;
    const weights = model.quantization === "none" ? model.dtype : `${model.dtype}, ${model.quantization}`;
    say("model", model.name);
    offer([model.name, ...model.adapters]);
    say("facts", `${size} · ${weights} · ${round(model.max_model_len)} tokens`);
    document.title = `${frame.running ? `${frame.running} running · ` : ""}${model.name} · Pagemill`;
    say("pool", `${round(blocks.used)} of ${round(blocks.total)} in use · ${round(blocks.cached)} with content kept · ` +
      `${round(blocks.shared)} shared · ${bytes(blocks.total * model.block_size * model.kv_bytes_per_token)}`);
  }
  say("decode", count(rates.decode_tokens));
  say("prompt", count(rates.prompt_tokens));
  if (rates.steps !== null) {
    sparks.decode.add(rates.decode_tokens);
    sparks.prompt.add(rates.prompt_tokens);
  }
  say("running", round(frame.running));
  say("waiting", round(frame.waiting));
  say("finished", round(frame.finished));
  frame.ttft.forEach((value, i) => say(`ttft-${i}`, time(value)));
  frame.itl.forEach((value, i) => say(`itl-${i}`, time(value)));
  say("hits", percent(frame.hit_rate));
  say("step", time(rates.step_s));
  say("batch", count(rates.batch));
  say("steps", count(rates.steps));
  $("meter").style.width = `${(100 * blocks.used) / Math.max(blocks.total, 1)}%`;
  if (frame.map) map.take(Uint8Array.from(atob(frame.map), (c) => c.charCodeAt(0)), frame.blocks_per_cell, blocks);
  showSequences(frame);
  showErrors(frame.errors);
}

// -- sequences

const rows = new Map(); // id -> its row and what changes in it

function progress() {
  const cell = element("td", "bar");
  const line = element("div", "progress");
  const track = element("div", "track");
  const [hit, done, told] = [element("span", "hit"), element("span", "done"), element("b")];
  track.append(hit, done);
  line.append(track, told);
  cell.append(line);
  return { cell, hit, done, told };
}

function newRow(id) {
  const row = element("tr");
  const made = { row, state: element("span", "tag"), adapter: element("span", "adapter"), prompt: progress(), output: progress(), blocks: element("td", "n blocks"), age: element("td", "n") };
  const what = element("td", "what");
  what.append(made.state, made.adapter);
  row.append(element("td", "id", `#${id.replace(/(\.0)+$/, "")}`), what, made.prompt.cell, made.output.cell, made.blocks, made.age);
  return made;
}

function fill(bar, hit, done, all, told) {
  bar.hit.style.width = `${(100 * hit) / Math.max(all, 1)}%`;
  bar.done.style.width = `${(100 * (done - hit)) / Math.max(all, 1)}%`;
  bar.told.textContent = told;
}

function showSequences({ sequences, running, waiting }) {
  const body = $("rows");
  const present = new Set(sequences.map((sequence) => sequence.id));
  for (const [id, made] of rows) {
    if (!present.has(id)) {
      made.row.remove();
      rows.delete(id);
    }
  }
  sequences.forEach((sequence, place) => {
    let made = rows.get(sequence.id);
    if (!made) rows.set(sequence.id, (made = newRow(sequence.id)));
    if (body.children[place] !== made.row) body.insertBefore(made.row, body.children[place] || null);
    const prefilling = sequence.state === "running" && sequence.computed < sequence.prompt;
    made.state.className = `tag ${sequence.state}`;
    made.state.textContent = prefilling ? "prefill" : sequence.state === "running" ? "decode" : sequence.preempted ? "preempted" : "waiting";
    made.adapter.textContent = sequence.adapter ?? "";
    fill(made.prompt, Math.min(sequence.cached, sequence.computed), sequence.computed, sequence.prompt, `${sequence.computed} / ${sequence.prompt}`);
    fill(made.output, 0, sequence.output, sequence.max_output, `${sequence.output} / ${sequence.max_output}`);
    made.blocks.textContent = sequence.blocks;
    made.age.textContent = time(sequence.age);
  });
  $("no-rows").hidden = sequences.length > 0;
  const more = running + waiting - sequences.length;
  say("seq-more", more > 0 ? `${round(more)} more` : "");
}

function showErrors(errors) {
  const told = errors.map((error) => `${error.status} ${error.id}`).join();
  const list = $("errors");
  $("no-errors").hidden = errors.length > 0;
  if (list.dataset.told !== told) {
    list.dataset.told = told;
    list.replaceChildren(...errors.map((error) => {
      const item = element("li");
      item.append(element("strong", "", error.status), element("span", "", WORDS[error.status] || "Error"), element("time"));
      item.append(element("code", "", [error.route, error.id].filter(Boolean).join("  ")));
      return item;
    }));
  }
  errors.forEach((error, i) => (list.children[i].querySelector("time").textContent = `${ago(Math.max(error.age, 0))} ago`));
}

// -- the map

class BlockMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.cells = new Uint8Array(0);
    this.born = new Float64Array(0); // when a cell last changed
    this.perCell = 1;
    this.pointed = null;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.readColours();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (this.readColours(), this.draw()));
    new ResizeObserver(() => (this.layOut(), this.draw())).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.point(this.cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.point(null));
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
      if (!step) return;
      event.preventDefault();
      this.point(Math.min(Math.max((this.pointed ?? -step) + step, 0), this.cells.length - 1));
    });
  }
  readColours() {
    const style = getComputedStyle(document.documentElement);
    const named = (name) => style.getPropertyValue(`--${name}`).trim();
    this.free = named("free");
    this.ink = named("ink");
    // by twice the reference count, plus one for content with a name
    this.colours = ["free", "cached", "filling", "full", "s2", "s2", "s3", "s3", "s3", "s3", "s5", "s5", "s5", "s5", "s7", "s7"].map(named);
  }
  take(cells, perCell, blocks) {
    const now = performance.now();
    const first = cells.length !== this.cells.length;
    if (first) this.born = new Float64Array(cells.length).fill(-FADE_MS);
    else for (let i = 0; i < cells.length; i++) if (cells[i] !== this.cells[i]) this.born[i] = now;
    this.cells = cells;
    this.perCell = perCell;
    this.canvas.setAttribute("aria-label", `Map of the KV blocks: ${blocks.used} of ${blocks.total} in use, ${blocks.shared} shared`);
    if (first) this.layOut();
    this.tell();
    this.animate();
  }
  layOut() {
    const scale = devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    const number = Math.max(this.cells.length, 1);
    let columns = Math.max(1, Math.floor(Math.sqrt((number * width) / height)));
    while (Math.ceil(number / columns) * (width / columns) > height) columns++;
    this.columns = columns;
    this.size = Math.min(width / columns, 40) * scale;
  }
  animate() {
    if (this.moving) return;
    const paint = (now) => {
      this.moving = this.draw(now) && !this.calm.matches ? requestAnimationFrame(paint) : 0;
    };
    this.moving = requestAnimationFrame(paint);
  }
  draw(now = performance.now()) {
    const { context, size, columns, cells } = this;
    const gap = size > 4 ? size * GAP : 0.5;
    let changing = false;
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let i = 0; i < cells.length; i++) {
      const x = (i % columns) * size;
      const y = Math.floor(i / columns) * size;
      const code = cells[i] & 15;
      const share = this.perCell > 1 && code > 1 ? 0.35 + (0.65 * (cells[i] >> 4)) / 15 : 1;
      const young = this.calm.matches ? 0 : Math.max(0, 1 - (now - this.born[i]) / FADE_MS);
      if (share < 1) this.square(x, y, size - gap, this.free);
      context.globalAlpha = share;
      this.square(x, y, size - gap, this.colours[code]);
      if (young > 0) {
        changing = true;
        context.globalAlpha = young * 0.5;
        this.square(x, y, size - gap, this.ink);
      }
      context.globalAlpha = 1;
      if (i === this.pointed) {
        context.strokeStyle = this.ink;
        context.lineWidth = 2;
        context.strokeRect(x, y, size - gap, size - gap);
      }
    }
    return changing;
  }
  square(x, y, side, colour) {
    this.context.fillStyle = colour;
    if (side < 6) return this.context.fillRect(x, y, side, side);
    this.context.beginPath();
    this.context.roundRect(x, y, side, side, side * 0.22);
    this.context.fill();
  }
  cellAt({ offsetX, offsetY }) {
    const side = this.size / (devicePixelRatio || 1);
    const column = Math.floor(offsetX / side);
    const cell = Math.floor(offsetY / side) * this.columns + column;
    return column < this.columns && cell < this.cells.length ? cell : null;
  }
  point(cell) {
    this.pointed = cell;
    this.tell();
    this.animate();
  }
  tell() {
    const cell = this.pointed;
    if (cell === null || cell >= this.cells.length) {
      return say("hint", this.perCell > 1 ? `A cell is ${this.perCell} blocks; its colour is that of the most shared.` : "Point at a block to see who holds it.");
    }
    const code = this.cells[cell] & 15;
    const holders = code >> 1;
    const first = cell * this.perCell;
    const name = this.perCell > 1 ? `Blocks ${first}–${first + this.perCell - 1}, at most` : `Block ${first}`;
    const held = holders ? `held by ${holders === 7 ? "7 or more" : holders} sequence${holders > 1 ? "s" : ""}` : "free";
    say("hint", `${name}: ${held}, ${code & 1 ? "content can be found again" : holders ? "being filled" : "empty"}`);
  }
}
const map = new BlockMap($("map"));

// -- chat

let messages = [];
let asking = null;

// Names to talk to; with one there is nothing to choose.
function offer(names) {
  const choice = $("voice");
  if (choice.length === names.length) return;
  choice.replaceChildren(...names.map((name) => element("option", undefined, name)));
  choice.hidden = names.length < 2;
}

async function ask(text) {
  asking = new AbortController();
  $("send").textContent = "Stop";
  const shown = bubble("assistant", "");
  const [thought, answer, facts] = [element("span", "thought"), element("span"), element("small")];
  shown.append(thought, answer, facts);
  const said = messages; // "New chat" begins another list
  said.push({ role: "user", content: text });
  try {
    const body = { messages: said, stream: true, stream_options: { include_usage: true } };
    if ($("voice").value) body.model = $("voice").value;
    if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
    const began = performance.now();
    const response = await fetch("v1/chat/completions", {
      method: "POST", body: JSON.stringify(body), signal: asking.signal,
      headers: { "Content-Type": "application/json", ...headers() },
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    let first = null;
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta;
      thought.textContent += delta?.reasoning_content ?? delta?.reasoning ?? "";
      answer.textContent += delta?.content ?? "";
      if (first === null && (delta?.content || delta?.reasoning_content || delta?.reasoning)) first = performance.now();
      if (chunk.usage) tellUsage(facts, chunk.usage, began, first);
      scrollDown();
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      shown.classList.add("failed");
      answer.textContent += error.message;
    }
  }
  if (answer.textContent && !shown.classList.contains("failed")) said.push({ role: "assistant", content: answer.textContent });
  else said.pop();
  asking = null;
  $("send").textContent = "Send";
  scrollDown();
}

function tellUsage(place, usage, began, first) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const speed = first === null ? 0 : (1000 * (usage.completion_tokens - 1)) / (performance.now() - first);
  place.textContent = `${usage.completion_tokens} tokens` + (speed > 0 ? ` · ${count(speed)} tokens/s` : "") +
    (first === null ? "" : ` · first after ${time((first - began) / 1000)}`) +
    (cached ? ` · ${cached} of ${usage.prompt_tokens} prompt tokens from the cache` : "");
}

function bubble(role, text) {
  const made = element("div", `said ${role}`, text || undefined);
  $("talk").querySelector(".empty")?.remove();
  $("talk").append(made);
  scrollDown();
  return made;
}

const scrollDown = () => ($("talk").scrollTop = $("talk").scrollHeight);

$("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (asking) return asking.abort();
  const text = $("say").value.trim();
  if (!text) return;
  $("say").value = "";
  bubble("user", text);
  ask(text);
});
$("say").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!asking) $("chat-form").requestSubmit();
  }
});
$("clear").addEventListener("click", () => {
  asking?.abort();
  messages = [];
  $("talk").replaceChildren();
  $("say").focus();
});

watch();
