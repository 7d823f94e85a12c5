/* The microscope's page. `meta` is JSON, columns are deflated float32, uint8 or uint32, as `pack` in
   microscope.py lays them out; texts reach the page through textContent alone. The hash keeps what is
   chosen: #colour=weight&what=own@token-mean&sort=weight&show=wrong. */
"use strict";

const meta = JSON.parse(document.getElementById("meta").textContent);
const root = document.documentElement, $ = (id) => document.getElementById(id);
const began = performance.now();

/* --- columns ----------------------------------------------------------------------------------- */

const columns = new Map();

async function inflate(text) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function joined(planes) {  // the bytes of a number, from the four planes they lie in
  const n = planes.length / 4, out = new Uint8Array(planes.length);
  for (let p = 0; p < 4; p++) for (let i = 0, at = p * n; i < n; i++) out[4 * i + p] = planes[at + i];
  return out.buffer;
}

async function load(name) {
  if (!columns.has(name)) {
    const planes = await inflate($("column-" + name).textContent);
    const array = name.startsWith("clip-") ? planes
      : name === "tokens" ? new Uint32Array(joined(planes)) : new Float32Array(joined(planes));
    columns.set(name, array);
  }
  return columns.get(name);
}

/* --- what can be shown ------------------------------------------------------------------------- */

const BLUE = [0, 114, 178], ORANGE = [213, 94, 0], CLIP = ["#fff", "#e69f00", "#56b4e9", "#cc79a7",
  "#f0e442", "#eee"];
const QUANTITIES = {
  weight: { label: "gradient weight", column: () => "weight-" + state.what, sign: -1,
    ends: ["makes it less likely", "makes it likelier"] },
  change: { label: "change of the weight's share", ends: ["pulled less than in the run", "pulled more"] },
  advantage: { label: "advantage", ends: ["worse than its group", "better"] },
  clip: { label: "clip state" },
  ratio: { label: "ratio to the old policy", log: true, ends: ["less likely than when sampled", "likelier"] },
  kl_k1: { label: "KL to the reference, k1 (nats)", ends: ["likelier to the reference", "likelier now"] },
  kl_k3: { label: "KL to the reference, k3 (nats)", ends: ["0", "far from the reference"], one: true },
  entropy: { label: "entropy (nats)", ends: ["0", "undecided"], one: true },
  logprobs: { label: "log-prob (nats)", ends: ["certain", "surprising"], one: true, flip: true },
  teacher_gap: { label: "teacher's log-prob less the policy's (nats)", ends: ["policy likelier", "teacher likelier"] },
  teacher_logprobs: { label: "teacher's log-prob (nats)", ends: ["certain", "surprising"], one: true, flip: true },
  divergence: { label: "value of the distillation loss", ends: ["0", "apart"], one: true },
  divergence_pull: { label: "norm of d loss / d logits, of the teacher's loss", ends: ["0", "hard pull"], one: true },
  score: { label: "score of the reward model", ends: ["low", "high"] },
  label: { label: "label of the step", one: true, ends: ["wrong", "right"] },
  mismatch: { label: "trainer less engine (nats)", ends: ["engine likelier", "trainer likelier"] },
};
if (meta.of_logits) Object.assign(QUANTITIES.weight,
  { label: "norm of d loss / d logits", one: true, ends: ["0", "hard pull"] });
if (meta.of_scores) Object.assign(QUANTITIES.weight,
  { label: "d loss / d score", ends: ["lowers its score", "raises it"] });
const CHOICES = {
  colour: Object.keys(QUANTITIES).filter((name) =>
    ["weight", "change", "clip"].includes(name) || meta.quantities.includes(name)),
  what: meta.variants.map((variant) => variant.name),
  sort: ["group", "weight", "change", "reward", "clipped", "length"],
  show: ["all", "wrong", "right", "clipped", "weighted"],
};
const SAYS = {
  sort: { group: "by prompt", weight: "largest weights first", change: "most changed first",
    reward: "lowest reward first", clipped: "most clipped first", length: "longest first" },
  show: { all: "all", wrong: meta.verdicts[0], right: meta.verdicts[1], clipped: "with clipped tokens",
    weighted: "with a weight" },
};
const state = { colour: "weight", what: 0, sort: "group", show: "all" };

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const sizes = meta.variants.map((variant) => sum(variant.size));
const share = (variant, row) => sizes[variant] ? meta.variants[variant].size[row] / sizes[variant] : 0;
const changed = (row) => share(state.what, row) - share(0, row);
const read = (x, digits = 4) => x === null || x === undefined || Number.isNaN(x) ? "not known"
  : typeof x === "number" ? String(Number(x.toPrecision(digits))) : String(x);
const percent = (x) => (100 * x).toFixed(1) + " %";

function valueAt(name, i) {
  if (name === "change") {
    const own = columns.get("weight-0")[i], now = columns.get("weight-" + state.what)[i];
    return (sizes[state.what] ? Math.abs(now) / sizes[state.what] : 0)
      - (sizes[0] ? Math.abs(own) / sizes[0] : 0);
  }
  return columns.get(QUANTITIES[name].column ? QUANTITIES[name].column() : name)[i];
}

function scaleOf(name) {
  if (name === "change") return 1 / Math.max(1, meta.offsets[meta.offsets.length - 1]);
  return meta.scales[QUANTITIES[name].column ? QUANTITIES[name].column() : name] || 1;
}

function mixed(colour, part) {  // never so dark that black text cannot be read on it
  const p = 0.8 * Math.min(1, part);
  return "rgb(" + colour.map((c) => Math.round(255 + (c - 255) * p)).join(",") + ")";
}

function colourOf(name, value, scale) {
  if (name === "clip") return CLIP[value];
  const quantity = QUANTITIES[name];
  if (Number.isNaN(value)) return "";
  let x = (quantity.log ? Math.log(value) : value) / scale;
  if (quantity.one) return mixed(BLUE, Math.abs(x));
  x *= quantity.sign || 1;
  return x === 0 ? "" : mixed(x > 0 ? BLUE : ORANGE, Math.abs(x));
}

/* --- rows -------------------------------------------------------------------------------------- */

const NEAR = 600;  // rows so many pixels out of view are drawn too
const drawn = new Map();  // row -> its element, of the rows whose tokens are in the page

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function verdict(row) {
  return row.correct === null ? "" : row.correct >= 1 ? "right" : "wrong";
}

function said(row) {
  return { right: meta.verdicts[1], wrong: meta.verdicts[0] }[verdict(row)] ?? "";
}

function about(index) {
  const row = meta.rows[index], parts = Object.entries(row.parts).map(([k, v]) => k + " " + read(v));
  const own = meta.variants[0], now = meta.variants[state.what], has = (name) => row[name] !== undefined;
  const words = [
    "#" + index, said(row), has("loss") ? "loss " + read(row.loss) : "",
    has("loss") && row.reward === null ? "" : "reward " + read(row.reward) + (parts.length ? " (" + parts.join(", ") + ")" : ""),
    row.status && row.status !== "ok" ? "reward status " + row.status : "",
    has("advantage") ? "advantage " + read(row.advantage) : "", has("finish_reason") ? "finish " + row.finish_reason : "",
    row.loss_tokens + " tokens with loss", has("sequence_ratio") ? "sequence ratio " + read(row.sequence_ratio) : "",
    now.clipped[index] ? now.clipped[index] + " clipped" : "", row.seen_by < 0 ? "read by no update" : "",
    "sum |weight| " + read(own.size[index]) + " (" + percent(share(0, index)) + ")",
  ];
  if (state.what) words.push("→ " + read(now.size[index]) + " (" + percent(share(state.what, index)) + ")");
  return words.filter((word) => word).join(" · ");
}

function paint(row) {
  const name = state.colour, scale = scaleOf(name), clips = columns.get("clip-" + state.what);
  for (const span of drawn.get(row).children) {
    const i = Number(span.dataset.i);
    span.className = clips[i] === 5 ? "off" : clips[i] ? "c" + clips[i] : "";
    span.style.backgroundColor = colourOf(name, name === "clip" ? clips[i] : valueAt(name, i), scale);
  }
}

function draw(row, holder) {
  const tokens = columns.get("tokens"), all = document.createDocumentFragment();
  for (let i = meta.offsets[row]; i < meta.offsets[row + 1]; i++) {
    const text = meta.texts[tokens[i]], span = element("span", "", text.replace(/\n/g, "⏎\n") || "∅");
    span.dataset.i = i;
    span.tabIndex = -1;
    all.append(span);
  }
  holder.replaceChildren(all);
  drawn.set(row, holder);
  paint(row);
}

const watcher = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    const row = Number(target.dataset.row);
    if (isIntersecting && !drawn.has(row)) draw(row, target);
    else if (!isIntersecting && drawn.size > 60 && drawn.has(row)) {  // far away: give it up again
      target.style.minHeight = target.offsetHeight + "px";
      target.replaceChildren();
      drawn.delete(row);
    }
  }
}, { rootMargin: NEAR + "px" });

function wanted(index) {
  const row = meta.rows[index], now = meta.variants[state.what];
  return { all: true, wrong: verdict(row) === "wrong", right: verdict(row) === "right",
    clipped: now.clipped[index] > 0, weighted: now.size[index] > 0 }[state.show];
}

function ordered() {
  const rows = meta.rows.map((_, index) => index).filter(wanted), now = meta.variants[state.what];
  const key = { weight: (i) => -now.size[i], change: (i) => -Math.abs(changed(i)),
    reward: (i) => meta.rows[i].reward ?? Infinity, clipped: (i) => -now.clipped[i],
    length: (i) => meta.offsets[i] - meta.offsets[i + 1] }[state.sort];
  return key ? rows.sort((a, b) => key(a) - key(b) || a - b) : rows;
}

function groupHead(row) {
  const group = meta.rows[row].group, of = meta.rows.flatMap((r, i) => r.group === group ? [i] : []);
  const head = element("h2", "", meta.rows[row].prompt ?? "group " + group);
  const total = (v) => sum(of.map((i) => meta.variants[v].size[i]));
  const part = (v) => sizes[v] ? total(v) / sizes[v] : 0;
  const after = state.what ? " → " + read(total(state.what)) + " (" + percent(part(state.what)) + ")" : "";
  head.append(element("br"), element("small", "group", "group " + group + ", " + of.length + " responses · sum |weight| "
    + read(total(0)) + " (" + percent(part(0)) + ")" + after));
  return head;
}

function lay() {
  watcher.disconnect();
  drawn.clear();
  const all = document.createDocumentFragment();
  let group = null;
  for (const index of ordered()) {
    const row = meta.rows[index];
    if (state.sort === "group" && row.group !== group) all.append(groupHead(index));
    group = row.group;
    const card = element("section", "row " + verdict(row)), holder = element("div", "tokens");
    card.append(element("div", "about", about(index)));
    if (state.sort !== "group") card.append(element("div", "about prompt", row.prompt ?? ""));
    holder.dataset.row = index;
    holder.tabIndex = 0;
    holder.setAttribute("aria-label", "tokens of response " + index + "; arrow keys go through them");
    holder.style.minHeight = Math.ceil((meta.offsets[index + 1] - meta.offsets[index]) * 36 / innerWidth) * 23 + "px";
    card.append(holder);
    all.append(card);
  }
  if (!all.children.length) all.append(element("p", "", "No response is like that."));
  $("rows").replaceChildren(all);
  const holders = [...document.querySelectorAll(".tokens")];
  for (const holder of holders) {  // what is in view at once: the watcher waits for a frame
    if (holder.getBoundingClientRect().top > innerHeight + NEAR) break;
    draw(Number(holder.dataset.row), holder);
  }
  holders.forEach((holder) => watcher.observe(holder));
}

/* --- what stands above ------------------------------------------------------------------------- */

function legend() {
  const quantity = QUANTITIES[state.colour], box = $("legend"), scale = scaleOf(state.colour);
  box.replaceChildren(element("span", "", quantity.label + ":"));
  if (state.colour === "clip") {
    meta.clip_states.forEach((name, i) => {
      const swatch = element("span", "swatch", name);
      swatch.style.backgroundColor = CLIP[i];
      box.append(swatch);
    });
    return;
  }
  const bar = element("span", "bar"), left = quantity.one ? "#fff" : mixed(ORANGE, 1);
  bar.style.background = "linear-gradient(to right," + left + "," + (quantity.one ? "" : "#fff,") + mixed(BLUE, 1) + ")";
  const end = (sign) => {
    const x = sign * scale * (quantity.sign || 1);
    return read(quantity.log ? Math.exp(x) : quantity.flip ? -x : x, 3);
  };
  const low = quantity.one ? "0" : end(-1), names = quantity.ends;
  box.append(element("span", "", low + " " + (names[0] === "0" ? "" : names[0])), bar, element("span", "", end(1) + " " + names[1]),
    element("span", "", "· underlined: clipped (full: high, dashed: low, double: dual), dotted: dropped; grey: no loss"));
}

function totals() {
  const own = meta.variants[0], now = meta.variants[state.what];
  const line = (v, i) => v.name + ": sum |weight| " + read(sizes[i]) + ", net " + read(sum(v.net)) + ", "
    + sum(v.clipped) + " clipped";
  $("totals").textContent = line(own, 0) + (state.what ? "  →  " + line(now, state.what) : "");
}

/* --- the numbers of one token ------------------------------------------------------------------ */

let pointed = null;

async function tell(span) {
  pointed = span;
  await Promise.all([...meta.quantities, "weight-0"].map(load));
  if (pointed !== span) return;
  const i = Number(span.dataset.i), row = Number(span.parentNode.dataset.row);
  const lines = [JSON.stringify(meta.texts[columns.get("tokens")[i]]) + "  token " + (i - meta.offsets[row]) + " of #" + row];
  for (const name of meta.quantities) lines.push(QUANTITIES[name].label + ": " + read(columns.get(name)[i], 6));
  lines.push("clip state: " + meta.clip_states[columns.get("clip-" + state.what)[i]]);
  lines.push(QUANTITIES.weight.label + " (own): " + read(columns.get("weight-0")[i], 6));
  if (state.what) lines.push(QUANTITIES.weight.label + " (" + meta.variants[state.what].name + "): " + read(columns.get("weight-" + state.what)[i], 6));
  const tip = $("tip"), box = span.getBoundingClientRect();
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(box.left, innerWidth - 440)) + "px";
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.top = (below ? box.bottom + 6 : Math.max(4, box.top - tip.offsetHeight - 6)) + "px";
}

function hush() {
  pointed = null;
  $("tip").hidden = true;
}

const token = (event) => event.target.dataset && event.target.dataset.i !== undefined ? event.target : null;
$("rows").addEventListener("mouseover", (event) => token(event) ? tell(event.target) : hush());
$("rows").addEventListener("focusin", (event) => { if (token(event)) tell(event.target); });
$("rows").addEventListener("mouseleave", hush);
$("rows").addEventListener("focusout", hush);
document.addEventListener("keydown", (event) => {
  const at = document.activeElement, inside = at && at.closest && at.closest(".tokens");
  if (event.key === "Escape") hush();
  if (!inside) return;
  const next = { ArrowRight: at === inside ? inside.firstChild : at.nextSibling, ArrowLeft: at.previousSibling,
    Home: inside.firstChild, End: inside.lastChild }[event.key];
  if (next && next.parentNode === inside) {
    event.preventDefault();
    next.focus();
    tell(next);  // a window in the background gets no focus event
  }
});

/* --- choices ----------------------------------------------------------------------------------- */

let changedAt = began, laid = "", given = new URLSearchParams(location.hash.slice(1));

function told() {  // how long the last change took until it was drawn
  root.dataset.drawnMs = (performance.now() - changedAt).toFixed(1);
  root.dataset.drawnRows = drawn.size;
}

async function apply() {
  changedAt = performance.now();
  delete root.dataset.drawnMs;
  const wrong = [];
  for (const [name, choices] of Object.entries(CHOICES)) {
    const asked = given.get(name) ?? choices[0];
    if (!choices.includes(asked)) wrong.push(name + " has no '" + asked + "'");
    const chosen = choices.includes(asked) ? asked : choices[0];
    state[name] = name === "what" ? choices.indexOf(chosen) : chosen;
    $(name).value = chosen;
  }
  $("message").textContent = wrong.join("; ");
  const measured = meta.quantities.includes(state.colour) ? [state.colour] : [];
  await Promise.all(["tokens", "weight-0", "weight-" + state.what, "clip-" + state.what, ...measured].map(load));
  legend();
  totals();
  const layout = [state.what, state.sort, state.show].join();
  if (layout !== laid) lay();
  else for (const row of drawn.keys()) paint(row);
  laid = layout;
  told();
}

for (const [name, choices] of Object.entries(CHOICES)) {
  for (const choice of choices) {
    const option = element("option", "", name === "colour" ? QUANTITIES[choice].label : SAYS[name] ? SAYS[name][choice] : choice);
    option.value = choice;
    $(name).append(option);
  }
  $(name).addEventListener("change", () => {
    given.set(name, $(name).value);
    try { history.replaceState(null, "", "#" + given); }
    catch { /* in MLflow's pane the page has no address of its own */ }
    apply();
  });
}
for (const note of meta.notes) $("notes").append(element("li", "", note));
addEventListener("hashchange", () => {
  given = new URLSearchParams(location.hash.slice(1));
  apply();
});
apply();
