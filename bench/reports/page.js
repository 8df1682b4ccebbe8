"use strict";
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const showTheme = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-pressed", String(isDark()));
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  showTheme();

  // The list of protocols lies over the page: it closes when one is chosen.
  const protocols = document.querySelector(".contents details");
  protocols?.addEventListener("click", (event) => { if (event.target.closest("a")) protocols.open = false; });

  // Buttons in the head of a table sort its rows: numbers by value, texts by alphabet, empty cells always last.
  const sortKey = (cell) => {
    if (cell.dataset.value !== undefined) return Number(cell.dataset.value);
    const text = cell.textContent.trim();
    return text === "" ? null : /^\d/.test(text) ? parseFloat(text) : text.toLowerCase();
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
    heads.forEach((head, column) => {
      const button = head.querySelector("button");
      if (!button) return;
      button.addEventListener("click", () => {
        const isNumeric = head.classList.contains("number");
        const current = head.getAttribute("aria-sort");
        const rising = current ? current === "descending" : !isNumeric; // the first click sorts numbers descending, texts ascending
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", rising ? "ascending" : "descending");
        const body = table.tBodies[0];
        const rowsWithKeys = [...body.rows].map((row) => [sortKey(row.cells[column]), row]);
        rowsWithKeys.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : rising ? compare(a, b) : compare(b, a)));
        body.append(...rowsWithKeys.map(([, row]) => row));
      });
    });
  }

  // Metrics besides the main one, and rows of initial weights beside many networks, are hidden until a button shows them.
  for (const button of document.querySelectorAll(".fold")) {
    const section = button.closest("section");
    const setFolded = (folded) => {
      section.classList.toggle(button.dataset.fold, folded);
      button.setAttribute("aria-expanded", String(!folded));
    };
    button.hidden = false;
    setFolded(!("open" in button.dataset));
    button.addEventListener("click", () => setFolded(button.getAttribute("aria-expanded") === "true"));
  }

  // A note with interval and number of images for the number under the pointer or with the focus.
  const note = document.getElementById("note");
  const explain = (event) => {
    const cell = event.target.closest?.("[data-note]");
    note.hidden = !cell;
    if (!cell) return;
    note.textContent = cell.dataset.note;
    const box = cell.getBoundingClientRect();
    note.style.left = `${Math.max(4, Math.min(box.left, innerWidth - note.offsetWidth - 4))}px`;
    note.style.top = `${box.bottom + 4 + note.offsetHeight > innerHeight ? box.top - note.offsetHeight - 4 : box.bottom + 4}px`;
  };
  document.addEventListener("mouseover", explain);
  document.addEventListener("focusin", explain);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") note.hidden = true; });
  document.addEventListener("scroll", () => { note.hidden = true; }, true);

  // Mark the edges beyond which a table or figure can be scrolled (page.css).
  const markOverflow = (box) => {
    box.classList.toggle("whole", box.scrollWidth <= box.offsetWidth);
    box.classList.toggle("goes-right", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
    box.classList.toggle("goes-down", box.scrollTop + box.clientHeight < box.scrollHeight - 1);
  };
  const sizes = new ResizeObserver((entries) => requestAnimationFrame(() => entries.forEach((entry) => markOverflow(entry.target))));
  for (const box of document.querySelectorAll(".scroll")) {
    box.addEventListener("scroll", () => markOverflow(box), { passive: true });
    sizes.observe(box);
  }

  // The filter, on pages of many checkpoints, hides the rows of those whose name does not contain its text.
  const filter = document.getElementById("filter");
  const shown = document.getElementById("shown");
  const elementsOfCheckpoints = [...document.querySelectorAll("[data-name]")];
  filter?.form.addEventListener("submit", (event) => event.preventDefault());
  filter?.addEventListener("input", () => {
    const text = filter.value.toLowerCase();
    const names = new Set();
    for (const element of elementsOfCheckpoints) {
      element.hidden = !element.dataset.name.toLowerCase().includes(text);
      if (!element.hidden) names.add(element.dataset.name);
    }
    shown.textContent = text ? `${names.size} shown` : "";
  });

  // The provenance of numbers is parsed when it is first needed: for 500 checkpoints it is most of the page.
  let results;
  const provenance = (index) => {
    results ??= JSON.parse(document.getElementById("results").textContent);
    return results.names.map((name, column) => [name, results.texts[results.rows[index][column]]]);
  };
  const dialog = document.getElementById("provenance");
  const body = document.getElementById("provenance-body");
  const definitionList = (entries) => {
    const list = document.createElement("dl");
    for (const [name, value] of entries) {
      const line = document.createElement("div");
      for (const [tag, text] of [["dt", name], ["dd", value]]) {
        const part = document.createElement(tag);
        part.textContent = text;
        line.append(part);
      }
      list.append(line);
    }
    return list;
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-results]");
    if (!button) return;
    body.replaceChildren(...button.dataset.results.split(" ").map((index) => definitionList(provenance(Number(index)))));
    dialog.showModal();
    dialog.scrollTop = 0; // it has scrolled to its button, which has the focus
  });
})();
