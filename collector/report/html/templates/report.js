"use strict";
// What the page can do beyond being read: find modules, choose a rank, sort, and keep both in the link.
// Nothing here makes HTML of text. The state is the link's: #rank=3&batch=68&module=fc1
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const search = document.getElementById("search");
  const rankBox = document.getElementById("rank");
  const found = document.getElementById("found");
  document.querySelector(".tools").hidden = !document.querySelector("[data-module], #by-rank details[data-rank], #ranks tr:nth-child(17)");

  let kept = "";
  const anchor = () => document.getElementById(location.hash.slice(1));  // of a link within the page: no state
  const read = () => {
    if (!anchor()) kept = location.hash.slice(1);
    return new URLSearchParams(kept);
  };
  const write = (changes) => {
    const before = read(), state = new URLSearchParams();
    for (const key of ["rank", "batch", "module"]) {
      const value = changes[key] ?? before.get(key) ?? "";
      if (value !== "") state.set(key, value);
    }
    const hash = state.toString();
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    show(false);
  };

  const show = (jump) => {
    const state = read();
    const rank = state.get("rank") ?? "", batch = state.get("batch") ?? "";
    const module = (state.get("module") ?? "").toLowerCase();
    if (document.activeElement !== search) search.value = state.get("module") ?? "";
    if (document.activeElement !== rankBox) rankBox.value = rank;
    const modules = new Set();
    for (const row of all("[data-module]")) {
      const fits = row.dataset.module.toLowerCase().includes(module);
      row.classList.toggle("out", !fits);
      if (fits && module) modules.add(row.dataset.module);
    }
    found.textContent = module ? `${modules.size} module${modules.size === 1 ? "" : "s"}` : "";
    for (const each of all(".chosen")) each.classList.remove("chosen");
    if (rank) for (const each of all(`[data-rank="${CSS.escape(rank)}"]`)) if (!each.matches("details")) each.classList.add("chosen");
    let first = null;
    for (const each of all("#by-rank details[data-rank]")) {
      const fits = (!rank || each.dataset.rank === rank) && (!batch || each.dataset.batch === batch);
      each.classList.toggle("out", !fits);
      each.open = fits && Boolean(rank || batch);
      if (fits && (rank || batch) && !first) first = each;
    }
    if (!jump) return;
    const target = first ?? (rank && document.querySelector(`#ranks [data-rank="${CSS.escape(rank)}"]`));
    if (!target) return;
    for (let parent = target.parentElement; parent; parent = parent.parentElement) if (parent.matches("details")) parent.open = true;
    target.scrollIntoView({ block: "center" });
  };

  search.addEventListener("input", () => write({ module: search.value }));
  rankBox.addEventListener("input", () => write({ rank: rankBox.value }));
  document.getElementById("clear").addEventListener("click", () => {
    search.value = rankBox.value = "";
    write({ rank: "", batch: "", module: "" });
  });
  addEventListener("hashchange", () => show(!anchor()));
  addEventListener("keydown", (event) => {
    if (event.key === "/" && !event.target.matches("input")) { event.preventDefault(); search.focus(); }
    if (event.key === "Escape" && event.target === search) { search.value = ""; write({ module: "" }); }
  });

  for (const table of all("table.sortable")) {
    all("thead th", table).forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        for (const other of all("thead th", table)) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column].textContent;
        const order = new Intl.Collator("en", { numeric: true });
        const compare = (a, b) => {
          const [x, y] = [key(a), key(b)], [m, n] = [parseFloat(x), parseFloat(y)];
          return Number.isNaN(m) || Number.isNaN(n) || m === n ? order.compare(x, y) : m - n;
        };
        const body = table.tBodies[0];
        body.append(...[...body.rows].sort((a, b) => (down ? -compare(a, b) : compare(a, b))));
      });
    });
  }
  for (const command of all("code.command")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "copy";
    button.setAttribute("aria-label", `copy ${command.textContent}`);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(command.textContent);
      } catch {  // a page of a file may not use the clipboard everywhere
        getSelection().selectAllChildren(command);
        document.execCommand("copy");
      }
      button.textContent = "copied";
    });
    command.after(button);
  }
  addEventListener("beforeprint", () => { for (const each of all("main > section > details")) each.open = true; });
  show(Boolean(read().get("rank") || read().get("batch")));
})();
