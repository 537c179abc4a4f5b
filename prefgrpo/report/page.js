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
// The viewer: an address of an item (#test-40-3) opens it; ← and → step through the list that it was opened from.
const items = JSON.parse(document.getElementById("items").textContent), byId = new Map(items.map(i => [i.id, i]));
const viewer = document.getElementById("viewer"), stage = viewer.querySelector(".stage"), said = viewer.querySelector(".said");
const range = viewer.querySelector("input"), ends = viewer.querySelectorAll(".wipe span");
const wipeButton = viewer.querySelector("[data-do=wipe]");
let list = items, current = null, wiping = false;
const make = (tag, text, parent, name) => {
  const node = document.createElement(tag);
  node.textContent = text ?? "";
  if (name) node.className = name;
  parent?.append(node);
  return node;
};
const wiped = () => stage.style.setProperty("--at", range.value + "%");
const show = item => {
  current = item;
  if (!list.includes(item)) list = items;
  viewer.querySelector("#viewer-prompt").textContent = item.prompt;
  viewer.querySelector("#viewer-where").textContent = item.where;
  viewer.querySelector("#viewer-place").textContent = `${list.indexOf(item) + 1} of ${list.length}`;
  viewer.querySelector("#viewer-link").href = "#" + item.id;
  stage.replaceChildren();
  const last = item.media.length - 1;
  item.media.forEach(([label, id], k) => {
    const of = document.getElementById(id), box = make("figure", "", stage), image = make("img", "", box);
    image.src = of.getAttribute("src") ?? of.getAttribute("href");
    image.alt = label;
    image.className = of.getAttribute("class");
    if (k >= last - 1) box.className = k === last ? "second" : "first";
    make("figcaption", label, box);
  });
  const names = item.media.slice(-2).map(m => m[0]);
  ends.forEach((end, k) => end.textContent = names[k]);
  stage.classList.toggle("wiping", wiping);
  stage.style.setProperty("--column", last);
  viewer.classList.toggle("wipes", wiping);
  wipeButton.setAttribute("aria-pressed", wiping);
  wiped();
  said.replaceChildren();
  const wins = Object.entries(item.wins).map(([who, win]) => `${who}: ${win > .5 ? names[1] + " wins" : win < .5 ? names[0] + " wins" : "tie"}`);
  if (wins.length) make("p", wins.join(" · "), said, "wins");
  if (item.orders.length) {
    const table = make("table", "", said), head = make("tr", "", make("thead", "", table)), body = make("tbody", "", table);
    const several = new Set(item.orders.map(order => order[0])).size > 1;
    for (const text of ["shown first", "prefers", "answer"]) make("th", text, head);
    for (const [judge, first, p, reason, raw] of item.orders) {
      const row = make("tr", "", body), winner = p > .5 ? names[first] : names[1 - first];
      make("td", (several ? judge + ": " : "") + names[first], row);
      make("td", p === null ? "no verdict" : `${p === .5 ? "neither" : winner} (${Math.max(p, 1 - p).toFixed(3)})`, row);
      make("pre", [reason, raw].filter(Boolean).join("\n") || "–", make("td", "", row));
    }
  } else if (item.mean !== null) {
    const p = item.mean, won = p === .5 ? "neither is better" : `${names[+(p < .5)]} is better`;
    make("p", `${won} (${Math.max(p, 1 - p).toFixed(3)}, mean over the orders). Single answers were not saved (judge.log is off).`, said);
  } else if (item.text || !wins.length) make("p", item.text || "No verdicts on these images were saved.", said);
};
const open = item => { show(item); if (!viewer.open) viewer.showModal(); viewer.scrollTop = 0; };
const step = by => {
  const item = list[(list.indexOf(current) + by + list.length) % list.length];
  history.replaceState(null, "", "#" + item.id);
  show(item);
};
const route = () => {
  const item = byId.get(decodeURIComponent(location.hash.slice(1)));
  if (item) open(item); else if (viewer.open) viewer.close();
};
viewer.addEventListener("close", () => { if (byId.has(location.hash.slice(1))) history.replaceState(null, "", "#"); });
viewer.addEventListener("click", event => {
  const action = event.target.closest("[data-do]")?.dataset.do;
  if (action === "close" || event.target === viewer) viewer.close();
  if (action === "previous") step(-1);
  if (action === "next") step(1);
  if (action === "wipe") { wiping = !wiping; show(current); }
});
viewer.addEventListener("keydown", event => {
  if (event.key === "w") wipeButton.click();
  if (event.target === range || event.altKey || event.ctrlKey || event.metaKey) return;
  if (event.key === "ArrowLeft") step(-1);
  if (event.key === "ArrowRight") step(1);
});
range.addEventListener("input", wiped);
stage.addEventListener("pointermove", event => {
  if (!wiping || (event.pointerType !== "mouse" && !event.pressure)) return;
  const box = stage.querySelector(".first img").getBoundingClientRect();
  range.value = Math.min(100, Math.max(0, (event.clientX - box.left) / box.width * 100));
  wiped();
});
addEventListener("hashchange", route);
document.addEventListener("click", event => {  // the list to step through is the one that was clicked in
  if (event.target.closest(".pair a")) list = [...document.querySelectorAll(".pair:not([hidden])")].map(f => byId.get(f.dataset.id));
  if (event.target.closest(".group a")) list = items.filter(i => i.orders.length || i.mean !== null);
  const kind = event.target.closest("[data-browse]")?.dataset.browse;
  if (kind === undefined) return;
  list = items.filter(i => kind ? i.kinds.includes(kind) : i.orders.length || i.mean !== null);
  location.hash = list[0].id;
});

// The filter of images.
const filter = document.querySelector(".filter");
if (filter) {
  const figures = [...document.querySelectorAll(".pair")], by = filter.querySelector("select");
  const buttons = [...filter.querySelectorAll("button")];
  const outcome = figure => {
    const wins = byId.get(figure.dataset.id).wins, win = wins[by ? by.value : Object.keys(wins)[0]];
    return win === undefined ? "" : win > .5 ? "won" : win < .5 ? "lost" : "tied";
  };
  const apply = pressed => {
    for (const button of buttons) {
      button.setAttribute("aria-pressed", button === pressed);
      const kind = button.dataset.show, many = figures.filter(f => outcome(f) === kind).length;
      if (["won", "lost", "tied"].includes(kind)) button.textContent = `${kind} ${many}`;
    }
    const kind = pressed.dataset.show;
    for (const figure of figures) figure.hidden = !["all", "changed", outcome(figure)].includes(kind);
    const order = [...figures].sort((a, b) => kind === "changed" ? b.dataset.change - a.dataset.change : 0);
    document.querySelector(".pairs").append(...order);
  };
  buttons.forEach(button => button.addEventListener("click", () => apply(button)));
  by?.addEventListener("change", () => apply(buttons.find(b => b.getAttribute("aria-pressed") === "true")));
  apply(buttons[0]);
}

// The section in view is marked in the navigation.
const links = new Map([...document.querySelectorAll("nav a")].map(a => [document.getElementById(a.hash.slice(1)), a]));
const mark = () => {
  const seen = [...links.keys()].filter(s => s.getBoundingClientRect().top < 100).pop() ?? [...links.keys()][0];
  const end = innerHeight + scrollY >= document.documentElement.scrollHeight - 2 ? [...links.keys()].pop() : seen;
  for (const [section, link] of links) section === end ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current");
};
addEventListener("scroll", mark, { passive: true });
mark();
route();
