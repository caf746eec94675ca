// Curves of the last minutes.

import { element, svg } from "./dom.js";

const MAX_MINUTES = 5;
const MARGIN = { left: 56, right: 6, top: 8, bottom: 20 };

export class Plot {
  // `base`: what the unit grows by, 1000 or 1024.
  constructor(parent, title, series, format, base = 1000) {
    this.base = base;
    this.title = title;
    this.series = series;
    this.format = format;
    this.samples = [];
    const legend = series.map((one) =>
      element("i", { class: one.colour }, series.length > 1 ? one.name : title));
    this.picture = svg("svg", { role: "img" });
    this.tip = element("div", { class: "tip", hidden: "" });
    parent.append(element("div", { class: "plot" },
      element("h3", {}, ...(series.length > 1 ? [title] : []), ...legend), this.picture, this.tip));
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  show(samples, now) {
    this.samples = samples;
    this.now = now;
    this.draw();
  }

  draw() {
    if (!this.samples.length) return;
    const width = this.picture.clientWidth || 320;
    const height = this.picture.clientHeight || 150;
    const minutes = Math.min(Math.max(Math.ceil((this.now - this.samples[0].time) / 60), 1), MAX_MINUTES);
    const span = 60 * minutes;
    const values = this.samples.flatMap((sample) => this.series.map((one) => sample[one.name]));
    const top = ceiling(Math.max(...values, 0), this.base);
    this.x = (time) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * (1 - (this.now - time) / span);
    const y = (value) => height - MARGIN.bottom - (height - MARGIN.top - MARGIN.bottom) * value / top;
    const parts = [0, 0.5, 1].flatMap((share) => [
      svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(share * top), y2: y(share * top) }),
      svg("text", { x: MARGIN.left - 7, y: y(share * top) + 4, "text-anchor": "end" }, this.format(share * top)),
    ]);
    for (let ago = 0; ago <= minutes; ago += 1) {
      parts.push(svg("text", {
        x: this.x(this.now - ago * 60), y: height - 4,
        "text-anchor": ago === minutes ? "start" : ago ? "middle" : "end",
      }, ago === 0 ? "now" : ago === minutes && minutes > 1 ? `−${ago}` : `−${ago} min`));
    }
    for (const one of this.series) {
      const points = this.samples.filter((sample) => this.now - sample.time <= span)
        .map((sample) => `${this.x(sample.time).toFixed(1)},${y(sample[one.name]).toFixed(1)}`);
      if (points.length < 2) continue;
      const base = y(0);
      const [first, last] = [points[0].split(",")[0], points.at(-1).split(",")[0]];
      parts.push(
        svg("path", { class: `area ${one.colour}`, d: `M${first},${base}L${points.join("L")}L${last},${base}Z` }),
        svg("path", { class: `curve ${one.colour}`, d: `M${points.join("L")}` }));
    }
    this.rule = svg("line", { class: "rule", y1: MARGIN.top, y2: height - MARGIN.bottom, visibility: "hidden" });
    this.picture.replaceChildren(...parts, this.rule);
    this.picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const latest = this.samples.at(-1);
    this.picture.setAttribute("aria-label", !latest ? `${this.title}: nothing yet` : `${this.title}: ` +
      this.series.map((one) => `${one.name} is ${this.format(latest[one.name])} now, at most ` +
        `${this.format(Math.max(...this.samples.map((sample) => sample[one.name])))}`).join("; "));
    if (this.pointer) this.point(this.pointer);
  }

  point(event) {
    this.pointer = event;
    if (!event || !this.samples.length) {
      this.tip.hidden = true;
      this.rule?.setAttribute("visibility", "hidden");
      return;
    }
    const box = this.picture.getBoundingClientRect();
    const at = event.clientX - box.left;
    const nearest = this.samples.reduce((best, sample) =>
      Math.abs(this.x(sample.time) - at) < Math.abs(this.x(best.time) - at) ? sample : best);
    const x = this.x(nearest.time);
    this.rule.setAttribute("x1", x);
    this.rule.setAttribute("x2", x);
    this.rule.setAttribute("visibility", "visible");
    this.tip.textContent = this.series.map((one) =>
      `${this.series.length > 1 ? `${one.name} ` : ""}${this.format(nearest[one.name])}`).join("\n");
    this.tip.style.left = `${Math.min(Math.max(x, 40), box.width - 40)}px`;
    this.tip.hidden = false;
  }
}

export function sparkline(values, colour) {
  const top = Math.max(...values, 1e-12);
  const picture = svg("svg", { viewBox: "0 0 100 26", preserveAspectRatio: "none", "aria-hidden": "true", class: colour });
  if (values.length < 2) return picture;
  const points = values.map((value, index) =>
    `${(100 * index / (values.length - 1)).toFixed(1)},${(24 - 22 * value / top).toFixed(1)}`);
  picture.append(svg("path", { class: "area", d: `M0,26L${points.join("L")}L100,26Z` }),
    svg("path", { class: "curve", d: `M${points.join("L")}` }));
  return picture;
}

// The next larger number of 1, 2 or 5 times a power of ten, of the unit that fits.
function ceiling(value, base) {
  if (!(value > 0)) return 1;
  if (base !== 1000 && value >= base) return base * ceiling(value / base, base);
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((bound) => bound >= value * 0.999);
}
