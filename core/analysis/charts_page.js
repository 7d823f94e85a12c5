"use strict";
// The pointer over any chart shows the values of the nearest step in all of them.
(() => {
  const { span, charts } = JSON.parse(document.getElementById("data").textContent);
  const figures = [...document.querySelectorAll("figure")];
  const [left, right] = [58, 14];
  const label = document.body.appendChild(document.createElement("div"));
  label.id = "step";
  const cursors = figures.map((figure) => {
    const svg = figure.querySelector("svg");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "cursor");
    line.setAttribute("y1", "12");
    line.setAttribute("y2", String(svg.viewBox.baseVal.height - 40));
    svg.appendChild(line);
    return line;
  });
  const last = figures.map((f) => [...f.querySelectorAll(".legend i")].map((i) => i.textContent));
  const text = (value) => String(Number(value.toPrecision(4)));

  function before(steps, step) {
    let low = 0;
    let high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  function show(step) {
    label.textContent = `step ${step}`;
    figures.forEach((figure, number) => {
      const svg = figure.querySelector("svg");
      const width = svg.viewBox.baseVal.width - left - right;
      const at = String(left + (width * (step - span[0])) / (span[1] - span[0]));
      cursors[number].setAttribute("x1", at);
      cursors[number].setAttribute("x2", at);
      cursors[number].style.visibility = "visible";
      figure.querySelectorAll(".legend i").forEach((entry, index) => {
        const { steps, values } = charts[number][index];
        const place = before(steps, step);
        entry.textContent = place < 0 ? "-" : text(values[place]);
      });
    });
  }

  function rest() {
    label.textContent = "";
    cursors.forEach((line) => { line.style.visibility = "hidden"; });
    figures.forEach((figure, number) => {
      figure.querySelectorAll(".legend i").forEach((entry, index) => {
        entry.textContent = last[number][index];
      });
    });
  }

  figures.forEach((figure) => {
    const svg = figure.querySelector("svg");
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
      const share = (at - left) / (svg.viewBox.baseVal.width - left - right);
      const step = Math.round(span[0] + share * (span[1] - span[0]));
      if (step >= span[0] && step <= span[1]) show(step);
    });
    svg.addEventListener("pointerleave", rest);
  });
})();
