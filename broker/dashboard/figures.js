// Numbers as people read them.

export function seconds(value) {
  if (!(value > 0)) return "0 s";
  if (value < 0.0009995) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.9995) return `${short(value * 1e3)} ms`;
  if (value < 59.95) return `${short(value)} s`;
  const minutes = Math.round(value / 60);
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 172800) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor(value / 3600) % 24} h`;
}

export function bytes(value) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (value < 999.5) return `${short(value)} ${unit}`;
    value /= 1024;
  }
  return `${short(value)} TiB`;
}

export function rate(value) {
  if (value < 9.95) return value.toFixed(1).replace(/\.0$/, "");
  return Math.round(value).toLocaleString("en");
}

export const count = (value) => Math.round(value).toLocaleString("en");

function short(value) {
  return Number(value.toPrecision(3)).toString();
}
