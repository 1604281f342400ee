"use strict";
// Draws /snapshot.json once a second. Everything that is shown is set as text, never as HTML.
const byId = (id) => document.getElementById(id);
const STYLES = { ok: "ok", paused: "bad", stuck: "bad", "read only": "bad", neglected: "bad" };

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
function number(value) { return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"); }
function percent(part, whole) { return whole ? (100 * part / whole).toFixed(1) + " %" : "–"; }
function size(bytes) {
  let value = bytes;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (value < 1024) return value.toFixed(unit === "B" ? 0 : 1) + " " + unit; value /= 1024; }
  return value.toFixed(1) + " TiB";
}
function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1e-3 ? (value * 1e6).toFixed(0) + " µs" : value < 1 ? (value * 1e3).toFixed(1) + " ms" : value.toFixed(2) + " s";
}
function table(id, head, rows, empty) {
  const body = [];
  if (rows.length) body.push(row(head.map(([text, kind]) => ["th", text, kind])));
  for (const cells of rows) body.push(row(cells.map(([text, kind]) => ["td", text, kind])));
  if (!rows.length) body.push(row([["td", empty, "text empty"]]));
  byId(id).replaceChildren(...body);
}
function row(cells) {
  const made = element("tr");
  made.append(...cells.map(([name, text, kind]) => element(name, text, kind)));
  return made;
}

function plot(id, at, lines, most) {
  const svg = byId(id), width = svg.clientWidth || 400, height = 136, left = 44, bottom = 18, top = 6;
  const space = "http://www.w3.org/2000/svg", parts = [];
  const highest = most || Math.max(1e-9, ...lines.flatMap(([, values]) => values.filter((v) => v !== null)));
  const x = (i) => left + (width - left - 4) * (at.length > 1 ? i / (at.length - 1) : 0);
  const y = (v) => top + (height - top - bottom) * (1 - v / highest);
  const draw = (name, attributes, text) => {
    const made = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parts.push(made);
  };
  for (const share of [0, 0.5, 1]) {
    draw("line", { class: "grid", x1: left, x2: width - 4, y1: y(highest * share), y2: y(highest * share) });
    const value = highest * share;
    draw("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value >= 1000 ? (value / 1000).toFixed(1) + "k" : value >= 10 || !value ? value.toFixed(0) : value.toPrecision(2));
  }
  if (at.length) {
    const time = (i) => new Date(1000 * at[i]).toLocaleTimeString("en-GB");
    draw("text", { x: left, y: height - 4 }, time(0));
    draw("text", { x: width - 4, y: height - 4, "text-anchor": "end" }, time(at.length - 1));
  }
  for (const [kind, values] of lines) {
    let path = "", pen = false;
    values.forEach((v, i) => { if (v === null) { pen = false; return; } path += (pen ? "L" : "M") + x(i).toFixed(1) + " " + y(v).toFixed(1); pen = true; });
    if (path) draw("path", { class: kind, d: path });
  }
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...parts);
}

function draw(told) {
  const { engine, requests, saved } = told;
  byId("engine").textContent = `${engine.instance_id}: ${engine.model}, ${engine.fingerprint.slice(0, 8)}, kvloom ${engine.kvloom}`;
  byId("why").hidden = !told.why;
  const figures = [
    [percent(requests.served_tokens, requests.asked_tokens), "hit rate, of tokens"],
    [number(saved.tokens), "tokens not prefilled"],
    [saved.seconds === null ? "–" : number(saved.seconds) + " s", saved.seconds === null ? "saved: set prefill_tokens_per_second" : "of prefill saved"],
    [number(requests.count), "requests"],
    [seconds(requests.seconds.p50), "median request; p99 " + seconds(requests.seconds.p99)],
  ];
  byId("figures").replaceChildren(...figures.map(([value, name]) => { const made = element("div"); made.append(element("b", value), element("span", name)); return made; }));
  const everything = told.tiers.reduce((sum, tier) => sum + tier.served_tokens, 0);
  table("tiers", [["tier", "text"], ["state", "text"], ["chunks"], ["holds"], ["of"], ["hits"], ["read"], ["p50"], ["p99"], ["written"], ["waiting"]],
    told.tiers.map((tier) => [[tier.name, "text"], [tier.state + (tier.state !== "ok" && tier.reason ? ": " + tier.reason : ""), "text " + (STYLES[tier.state] || "")],
      [number(tier.blobs)], [size(tier.bytes)], [tier.capacity ? `${percent(tier.bytes, tier.capacity)} of ${size(tier.capacity)}` : "–"],
      [percent(tier.served_tokens, everything)], [tier.read_bytes === null ? "–" : size(tier.read_bytes)], [seconds(tier.read_seconds.p50)], [seconds(tier.read_seconds.p99)],
      [tier.written_bytes ? size(tier.written_bytes) : "–"], [size(tier.waiting_bytes)]]), "no tier");
  const reasons = [["missed", "tokens"], ["evicted", "chunks"], ["dropped", "chunks"]].flatMap(([what, unit]) =>
    Object.entries(told[what]).map(([reason, count]) => [[what, "text"], [reason, "text"], [`${number(count)} ${unit}`]]));
  table("reasons", [["", "text"], ["why", "text"], ["how much"]], reasons, "nothing yet");
  table("prefixes", [["prefix", "text"], ["tokens"], ["hits"], ["tokens saved"]],
    told.prefixes.slice(0, 10).map((one) => [[one.digest, "text mono"], [number(one.tokens)], [number(one.hits)], [number(one.saved_tokens)]]), "no hit yet");
  table("errors", [["when", "text"], ["tier", "text"], ["what", "text"]],
    told.errors.slice().reverse().map((one) => [[new Date(1000 * one.at).toLocaleTimeString("en-GB"), "text"], [one.tier, "text"], [`${one.what} ${one.reason}`, "text"]]), "no trouble");
  if (!told.series) return;
  const step = byId("step").value, columns = told.series[step], per = (values, by = 1) => values.map((value) => value / step / by);
  plot("hits", columns.at, [["a", columns.asked.map((asked, i) => asked ? 100 * columns.served[i] / asked : null)]], 100);
  plot("tokens", columns.at, [["b", per(columns.asked)], ["a", per(columns.served)]]);
  plot("bytes", columns.at, [["b", per(columns.written_bytes, 1e6)], ["a", per(columns.read_bytes, 1e6)]]);
  plot("latency", columns.at, [["a", columns.requests.map((count, i) => count ? 1000 * columns.seconds[i] / count : null)]]);
}

async function look() {
  const state = byId("state");
  try {
    const answer = await fetch("snapshot.json"), told = await answer.json();
    if (!answer.ok) throw new Error(told.error);
    draw(told);
    state.textContent = "";
    state.className = "";
  } catch (error) {
    state.textContent = "the engine is gone: " + error.message;
    state.className = "gone";
  }
  setTimeout(look, 1000);
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const refused = byId("refused");
  refused.textContent = "";
  byId("verdicts").replaceChildren();
  try {
    const tokens = JSON.parse(byId("prompt").value), salt = byId("salt").value;
    const answer = await fetch("why.json", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ tokens, salts: salt ? [salt] : [] }) });
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.error);
    table("verdicts", [["tokens", "text"], ["verdict", "text"], ["where or why", "text"]],
      told.chunks.map((one) => [[`${one.start}–${one.end}`, "text"], [one.verdict, "text"],
        [one.tiers.join(", ") + (one.why ? " " + one.why : ""), "text"]]), "no chunk");
  } catch (error) {
    refused.textContent = error.message;
  }
});
look();
