"use strict";
// The search finds sections with all words. Words in the heading and in the page's title have the highest weight.
(() => {
  const root = document.documentElement.dataset.root;
  const box = document.querySelector("#search input"), found = document.querySelector("#found");
  const most = 20;
  let loading;

  // load reads the index once. The index is a script, because browsers also load scripts from a disk.
  const load = () => loading ??= new Promise((done, failed) => {
    const script = document.createElement("script");
    script.src = root + "search-index.js";
    script.onload = () => done(globalThis.kvatlasIndex.map(s =>
      ({ ...s, page: s.p.toLowerCase(), heading: s.h.toLowerCase(), text: s.x.toLowerCase() })));
    script.onerror = failed;
    document.head.append(script);
  });

  const score = (s, words) => {
    let sum = s.heading === words.join(" ") ? 20 : 0;
    for (const w of words) {
      const n = (s.heading.includes(w) ? 8 : 0) + (s.page.includes(w) ? 4 : 0) + Math.min(5, s.text.split(w).length - 1);
      if (n === 0) return 0;
      sum += n;
    }
    return sum;
  };

  const excerpt = (s, word) => {
    const at = Math.max(0, s.text.indexOf(word) - 40);
    return (at > 0 ? "… " : "") + s.x.slice(at, at + 140);
  };

  const show = (sections, words) => {
    found.replaceChildren(...sections.map(s => {
      const item = document.createElement("li"), link = document.createElement("a");
      const title = document.createElement("b"), text = document.createElement("small");
      link.href = root + s.u;
      title.textContent = s.h === s.p ? s.h : s.p + ": " + s.h;
      text.textContent = excerpt(s, words[0]);
      link.append(title, text);
      item.append(link);
      return item;
    }));
    if (sections.length === 0) {
      const none = document.createElement("li");
      none.textContent = "No section has all of these words.";
      found.append(none);
    }
    found.hidden = false;
  };

  const search = async () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length === 0) {
      found.hidden = true;
      return;
    }
    const typed = box.value, index = await load();
    if (typed !== box.value) return; // a later search is running
    const hits = index.map(s => [score(s, words), s]).filter(([n]) => n > 0);
    hits.sort((a, b) => b[0] - a[0]);
    show(hits.slice(0, most).map(([, s]) => s), words);
  };

  box.addEventListener("focus", load);
  box.addEventListener("input", search);
  box.addEventListener("keydown", e => {
    if (e.key === "Enter" && !found.hidden) found.querySelector("a")?.click();
  });
  document.addEventListener("keydown", e => {
    if (e.key === "/" && document.activeElement !== box) {
      e.preventDefault(); // prevents the browser's own search
    } else if (e.key === "Escape") {
      found.hidden = true;
      box.blur();
    }
  });
  document.addEventListener("keyup", e => { // after keydown, because the box would also receive the key
    if (e.key === "/" && document.activeElement !== box) box.focus();
  });
})();
