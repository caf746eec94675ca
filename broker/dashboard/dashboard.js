// Asks the broker for its status every second and shows it.

import { element, setText, update } from "./dom.js";
import * as figures from "./figures.js";
import { Plot, sparkline } from "./plots.js";
import { draw } from "./traffic.js";

const INTERVAL = 1000;
const PATIENCE = 4000;
const BAD = new Set(["lost", "error", "refused", "malformed", "full"]);
const TONES = { lost: "bad", error: "bad", refused: "careful", malformed: "careful", full: "careful" };
const $ = (id) => document.getElementById(id);

let before = null;
let flows = new Map();

const plots = [
  new Plot($("plots"), "Calls a second", [{ name: "calls", colour: "blue" }], figures.rate),
  new Plot($("plots"), "Bytes a second through the broker", [{ name: "bytes", colour: "teal" }], figures.bytes, 1024),
  new Plot($("plots"), "Time of a call", [{ name: "p99", colour: "orange" }, { name: "p50", colour: "violet" }], figures.seconds),
  new Plot($("plots"), "Longest turn of the broker's loop", [{ name: "loop", colour: "teal" }], figures.seconds),
];

const tiles = [
  { title: "Peers", colour: "blue", key: "peers", format: figures.count },
  { title: "Calls a second", colour: "blue", key: "calls", format: figures.rate },
  { title: "Through the broker", colour: "teal", key: "bytes", format: (value) => `${figures.bytes(value)}/s` },
  { title: "Median call", colour: "violet", key: "p50", format: figures.seconds },
  { title: "99 % of calls within", colour: "orange", key: "p99", format: figures.seconds },
  { title: "Broker's loop", colour: "teal", key: "loop", format: figures.seconds },
];

function show(status) {
  const elapsed = before ? status.time - before.time : 0;
  if (!before || elapsed > 0) flows = measure(status, before, elapsed);
  setText($("address"), `${status.addresses.join(", ")} · version ${status.versions.tensorplay} · up ${figures.seconds(status.uptime)}`);
  document.title = `${count(status)} peers · tensorplay broker`;
  showTiles(status);
  for (const plot of plots) plot.show(status.samples, status.time);
  update($("warnings"), status.warnings, (text) => text, (text) => element("li", {}, text));
  const namespaces = Object.keys(status.namespaces).sort();
  showFilter(namespaces);
  const chosen = $("filter").value || null;
  showPeers(status, chosen);
  showTraffic(status, chosen);
  showEvents(status);
  setText($("footer"), `broker: busy ${(100 * status.health.busy).toFixed(1)} %, memory ${figures.bytes(status.health.memory_bytes)}`);
  if (elapsed !== 0 || !before) before = status;
}

function count(status) {
  return Object.values(status.namespaces).reduce((sum, told) => sum + told.peers.length, 0);
}

function showTiles(status) {
  const latest = status.samples.at(-1) ?? {};
  $("tiles").replaceChildren(...tiles.map((tile) => {
    const values = status.samples.slice(-120).map((sample) => sample[tile.key]);
    const value = tile.key === "peers" ? count(status) : latest[tile.key] ?? 0;
    return element("div", { class: "tile" }, element("h3", {}, tile.title),
      element("p", { id: `tile-${tile.key}` }, tile.format(value)), sparkline(values, tile.colour));
  }));
}

function showFilter(namespaces) {
  const options = ["", ...namespaces];
  update($("filter"), options, (name) => `:${name}`, (name) => element("option", { value: name }, name || "all"));
  $("filter-label").hidden = namespaces.length < 2;
}

function peersOf(status, chosen) {
  return Object.entries(status.namespaces)
    .filter(([namespace]) => !chosen || namespace === chosen)
    .sort(([one], [other]) => one.localeCompare(other))
    .flatMap(([namespace, told]) => told.peers.map((peer) => ({ ...peer, namespace }))
      .sort((a, b) => (a.id < 0) - (b.id < 0) || Math.abs(a.id) - Math.abs(b.id)));
}

const LABELS = ["rank", "", "on", "device", "up", "heard", "modules", "RRefs", "in flight", "queued", "calls/s", "bytes/s", "p50", "p99", "memory"];

function showPeers(status, chosen) {
  const peers = peersOf(status, chosen);
  const several = Object.keys(status.namespaces).length > 1;
  update($("peers").tBodies[0], peers, (peer) => `${peer.namespace}/${peer.incarnation}`, (peer) =>
    element("tr", {}, element("th", { scope: "row" }, several ? `${peer.namespace} / ${peer.name}` : peer.name),
      ...LABELS.map((label, index) => element("td", {
        class: index === 1 ? "state" : index === 2 || index === 3 ? "" : "number", "data-label": label || null,
      }))),
  (row, peer) => {
    const [, ...cells] = row.children;
    cellsOf(peer, status).forEach((text, index) => {
      if (index === 1) showState(cells[1], peer, status);
      else setText(cells[index], text);
    });
  });
  $("nobody").hidden = peers.length > 0;
  $("peers").hidden = peers.length === 0;
}

function cellsOf(peer, status) {
  const { stats, rates } = peer;
  const p50 = stats.call_p50 || stats.served_p50;
  const p99 = stats.call_p99 || stats.served_p99;
  return [
    peer.id >= 0 ? String(peer.id) : "–", "", `${peer.host} : ${peer.pid}`, peer.device,
    figures.seconds(peer.registered_for), `${figures.seconds(peer.silent_for)} ago`,
    figures.count(stats.modules ?? 0), `${stats.rrefs_owned ?? 0} + ${stats.rrefs_used ?? 0}`,
    figures.count((stats.calls_in_flight ?? 0) + (stats.requests_in_progress ?? 0)),
    figures.bytes(peer.queued_bytes), figures.rate(rates.calls_made + rates.calls_served),
    figures.bytes(rates.bytes_received + rates.bytes_sent),
    p50 ? figures.seconds(p50) : "–", p99 ? figures.seconds(p99) : "–",
    stats.memory_bytes ? figures.bytes(stats.memory_bytes) : "–",
  ];
}

function showState(cell, peer, status) {
  const silent = peer.silent_for > status.config.heartbeat_timeout;
  const [text, tone] = peer.away ? ["away", "bad"] : silent ? ["silent", "careful"] : [peer.role, "good"];
  if (cell.textContent !== text) cell.replaceChildren(element("span", { class: `pill ${tone}` }, text));
  cell.title = peer.away || (silent ? "connected, but says nothing" : "");
}

// What flows between pairs a second, from two counts of what has flowed so far.
function measure(status, earlier, elapsed) {
  const measured = new Map();
  for (const [namespace, told] of Object.entries(status.namespaces)) {
    const old = new Map((earlier?.namespaces[namespace]?.traffic ?? []).map((pair) => [`${pair.from} ${pair.to}`, pair]));
    measured.set(namespace, told.traffic.map((pair) => {
      const past = old.get(`${pair.from} ${pair.to}`) ?? (earlier ? { bytes: 0, messages: 0 } : pair);
      const each = (key) => elapsed > 0 ? Math.max(0, pair[key] - past[key]) / elapsed : 0;
      return { from: pair.from, to: pair.to, bytes: each("bytes"), messages: each("messages"), total: pair.bytes };
    }));
  }
  return measured;
}

function showTraffic(status, chosen) {
  const several = Object.keys(status.namespaces).length > 1 && !chosen;
  const full = (namespace, name) => several ? `${namespace}/${name}` : name;
  const peers = peersOf(status, chosen).map((peer) => ({ name: full(peer.namespace, peer.name), role: peer.role, away: Boolean(peer.away) }));
  const shown = [...flows].filter(([namespace]) => !chosen || namespace === chosen).flatMap(([namespace, pairs]) =>
    pairs.map((pair) => ({ ...pair, from: full(namespace, pair.from), to: full(namespace, pair.to) })));
  draw($("traffic"), peers, shown);
  update($("pairs").tBodies[0], shown.sort((a, b) => b.bytes - a.bytes).slice(0, 50), (pair) => `${pair.from} ${pair.to}`,
    () => element("tr", {}, element("td"), element("td"), ...[1, 2, 3].map(() => element("td", { class: "number" }))),
    (row, pair) => [pair.from, pair.to, figures.bytes(pair.bytes), figures.rate(pair.messages), figures.bytes(pair.total)]
      .forEach((text, index) => setText(row.children[index], text)));
}

function showEvents(status) {
  const events = status.happenings.filter((event) => BAD.has(event.kind)).sort((a, b) => b.time - a.time).slice(0, 60);
  const several = Object.keys(status.namespaces).length > 1;
  update($("events"), events, (event) => [event.kind, event.namespace, event.peer, event.text].join("\n"), (event) =>
    element("li", {}, element("time"), element("span", { class: `pill ${TONES[event.kind]}` }, event.kind),
      element("span", { class: "text" }, element("b", {}, several ? `${event.namespace} / ${event.peer}` : event.peer), ` ${event.text}`, element("span"))),
  (item, event) => {
    const when = new Date((status.wall_time - status.time + event.time) * 1000);
    setText(item.children[0], when.toLocaleTimeString("en-GB"));
    item.children[0].setAttribute("datetime", when.toISOString());
    setText(item.children[2].lastChild, event.count > 1 ? ` (${event.count} times)` : "");
  });
  $("quiet").hidden = events.length > 0;
}

function setLink(text, tone) {
  setText($("link"), text);
  $("link").className = `pill ${tone}`;
  document.body.classList.toggle("stale", tone === "bad");
}

async function refresh() {
  if (!document.hidden) {
    try {
      const answer = await fetch("api/status", { signal: AbortSignal.timeout(PATIENCE) });
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      show(await answer.json());
      setLink("live", "good");
    } catch (error) {
      console.debug(error);
      setLink("broker does not answer", "bad");
    }
  }
  setTimeout(refresh, INTERVAL);
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

const preferred = matchMedia("(prefers-color-scheme: dark)");
const chosenTheme = () => localStorage.getItem("theme") ?? (preferred.matches ? "dark" : "light");
preferred.addEventListener("change", () => applyTheme(chosenTheme()));
$("theme").addEventListener("click", () => {
  localStorage.setItem("theme", chosenTheme() === "dark" ? "light" : "dark");
  applyTheme(chosenTheme());
});
$("filter").addEventListener("change", () => before && show(before));
applyTheme(chosenTheme());
refresh();
