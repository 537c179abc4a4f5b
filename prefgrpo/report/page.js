document.body.classList.add("live");
const number = value => {  // three significant digits, as charts.number
  const rounded = +value.toPrecision(3), size = Math.abs(rounded);
  const text = size && (size < 1e-4 || size >= 1e5) ? rounded.toExponential() : String(rounded);
  const [digits, power] = text.split("e");
  return digits.replace("-", "−") + (power ? "×10" + [...power.replace("+", "")].map(c => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻").join("") : "");
};
for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.dataset.chart), svg = figure.querySelector("svg");
  const cursor = svg.querySelector(".cursor"), values = [...figure.querySelectorAll(".legend b")];
  const last = values.map(b => b.textContent), note = document.createElement("em");
  note.className = "at";
  figure.querySelector(".legend").append(note);
  const [left, right, x0, x1] = data.box, steps = [...new Set(data.s.flatMap(s => s[0]))].sort((a, b) => a - b);
  const show = event => {
    const box = svg.getBoundingClientRect(), px = (event.clientX - box.left) / box.width * data.w;
    const wanted = x0 + (px - left) / (right - left) * (x1 - x0);
    const step = steps.reduce((a, b) => Math.abs(b - wanted) < Math.abs(a - wanted) ? b : a);
    const x = left + (step - x0) / (x1 - x0) * (right - left);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.style.opacity = 1;
    note.textContent = "step " + Math.round(step);
    data.s.forEach((s, k) => {
      const at = s[0].indexOf(step), y = at < 0 ? null : s[1][at];
      values[k].textContent = y === null ? "–" : number(y) + data.u;
    });
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => {
    cursor.style.opacity = 0; note.textContent = "";
    values.forEach((b, k) => b.textContent = last[k]);
  });
}
