// Who sends how much to whom: peers on a circle, flows as curves between them.

import { element, svg } from "./dom.js";
import * as figures from "./figures.js";

const SIZE = 440;
const MIDDLE = SIZE / 2;
const MAX_NODES = 24;

// `peers`: {name, role, away}; `flows`: {from, to, bytes, messages}, both a second.
export function draw(parent, peers, flows) {
  const load = new Map(peers.map((peer) => [peer.name, 0]));
  for (const flow of flows) {
    load.set(flow.from, (load.get(flow.from) ?? 0) + flow.bytes);
    load.set(flow.to, (load.get(flow.to) ?? 0) + flow.bytes);
  }
  const shown = [...peers].sort((a, b) => load.get(b.name) - load.get(a.name)).slice(0, MAX_NODES)
    .sort((a, b) => a.role.localeCompare(b.role) || a.name.localeCompare(b.name, "en", { numeric: true }));
  if (!shown.length) {
    parent.replaceChildren(element("p", { class: "empty" }, "No peer is registered."));
    return;
  }
  const radius = shown.length > 1 ? 135 : 0;
  const places = new Map(shown.map((peer, index) => {
    const angle = 2 * Math.PI * index / shown.length - Math.PI / 2;
    return [peer.name, { x: MIDDLE + radius * Math.cos(angle), y: MIDDLE + radius * Math.sin(angle), angle }];
  }));
  const visible = flows.filter((flow) => places.has(flow.from) && places.has(flow.to) && flow.from !== flow.to);
  const most = Math.max(...visible.map((flow) => flow.bytes), 1);
  const picture = svg("svg", { viewBox: `0 0 ${SIZE} ${SIZE}`, role: "img", "aria-label": describe(shown, visible) });
  visible.sort((a, b) => a.bytes - b.bytes);
  for (const flow of visible) picture.append(...curve(flow, places, most, shown));
  for (const peer of shown) picture.append(node(peer, places.get(peer.name), radius));
  const more = peers.length > shown.length ? element("span", {}, `and ${peers.length - shown.length} more`) : null;
  parent.replaceChildren(picture, element("p", { class: "key" },
    element("i", { class: "blue" }, element("span", {}, "worker")),
    element("i", { class: "violet" }, element("span", {}, "client")), more));
}

function curve(flow, places, most, peers) {
  const [from, to] = [places.get(flow.from), places.get(flow.to)];
  // Both ways keep to their own side.
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const bend = 0.16;
  const control = {
    x: (from.x + to.x) / 2 + (MIDDLE - (from.x + to.x) / 2) * 0.25 - dy * bend,
    y: (from.y + to.y) / 2 + (MIDDLE - (from.y + to.y) / 2) * 0.25 + dx * bend,
  };
  const d = `M${from.x},${from.y}Q${control.x},${control.y} ${to.x},${to.y}`;
  const colour = peers.find((peer) => peer.name === flow.from).role === "client" ? "violet" : "blue";
  const title = () => svg("title", {}, `${flow.from} → ${flow.to}: ${figures.bytes(flow.bytes)}/s, ${figures.rate(flow.messages)} messages/s`);
  if (!flow.messages) return [svg("path", { class: "flow idle", d, "stroke-width": 1.5 }, title())];
  const width = 1.5 + 7 * Math.log1p(flow.bytes) / Math.log1p(most);
  return [
    svg("path", { class: `flow ${colour}`, d, "stroke-width": width.toFixed(1), "stroke-opacity": 0.35 }, title()),
    svg("path", { class: `flow moving ${colour}`, d, "stroke-width": Math.max(2, width * 0.45).toFixed(1) }),
  ];
}

function node(peer, place, radius) {
  const right = Math.cos(place.angle) > 0.25;
  const left = Math.cos(place.angle) < -0.25;
  const gap = 20;
  const text = peer.name.length > 16 ? `${peer.name.slice(0, 15)}…` : peer.name;
  const colour = peer.away ? "away" : peer.role === "client" ? "violet" : "blue";
  const below = radius === 0 || Math.sin(place.angle) > 0 ? gap + 12 : -gap - 2;
  return svg("g", { class: colour },
    svg("circle", { class: "node", cx: place.x, cy: place.y, r: 13 }, svg("title", {}, `${peer.name} (${peer.role})`)),
    svg("text", {
      x: place.x + (right ? gap : left ? -gap : 0),
      y: place.y + (right || left ? 4 : below),
      "text-anchor": right ? "start" : left ? "end" : "middle",
    }, text));
}

function describe(peers, flows) {
  const busiest = flows.filter((flow) => flow.messages).slice().sort((a, b) => b.bytes - a.bytes)[0];
  const start = `${peers.length} peers. `;
  if (!busiest) return `${start}Nothing flows between them now.`;
  return `${start}Most flows from ${busiest.from} to ${busiest.to}: ${figures.bytes(busiest.bytes)} a second.`;
}
