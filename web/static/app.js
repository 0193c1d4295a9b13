// What the dashboard does beyond plain pages. Everything here improves a page
// that works without it: live updates, copying, asking before a danger.
"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const root = document.documentElement;
  const stream = $("stream");
  root.classList.add("js");

  // ---- times -------------------------------------------------------------
  // The same words as format.go writes.
  const two = (a, au, b, bu) => `${a} ${au}` + (b ? ` ${b} ${bu}` : "");
  const age = (s) => s < 60 ? `${s} s` : s < 3600 ? two(s / 60 | 0, "min", s % 60, "s")
    : s < 86400 ? two(s / 3600 | 0, "h", s % 3600 / 60 | 0, "min") : two(s / 86400 | 0, "d", s % 86400 / 3600 | 0, "h");
  const ago = (s) => s < 2 ? "now" : s < 60 ? `${s} s ago` : s < 3600 ? `${s / 60 | 0} min ago`
    : s < 86400 ? `${s / 3600 | 0} h ago` : `${s / 86400 | 0} d ago`;
  let skew = 0; // the server's clock minus ours, in ms
  const sinceMs = (iso) => Date.now() + skew - Date.parse(iso);
  const setText = (el, text) => { if (el.textContent !== text) el.textContent = text; };
  function tick() {
    if (document.hidden) return;
    for (const t of document.querySelectorAll("time[data-t]")) {
      const s = Math.max(0, sinceMs(t.dateTime) / 1000 | 0);
      setText(t, t.dataset.t === "ago" ? ago(s) : age(s));
    }
    if (!$("stale").hidden) setText($("stale-age"), age((Date.now() - fresh) / 1000 | 0));
  }

  // ---- the live mark -----------------------------------------------------
  // live: the stream is open. paused: the reader wants quiet. reconnecting:
  // it broke a moment ago. stale: it has been broken for STALE_MS.
  const STALE_MS = 3000, QUIET_MS = 10000, THROTTLE_MS = 400;
  const words = { live: "Live", paused: "Paused", reconnecting: "Reconnecting", stale: "Stale" };
  let mark = "", fresh = Date.now(), broken = 0, open = false;
  function show(next) {
    if (mark === next || !stream) return;
    mark = next;
    const button = $("mark"), glyph = button.querySelector("use");
    button.hidden = false;
    button.title = next === "paused" ? "Press to follow again" : "Press to pause the live view";
    button.firstElementChild.dataset.s = next === "reconnecting" ? "stale" : next;
    const icon = next === "reconnecting" ? "refresh" : next;
    glyph.setAttribute("href", glyph.getAttribute("href").replace(/#.*/, "#" + icon));
    setText($("mark-word"), words[next]);
    const gone = next === "stale";
    $("stale").hidden = !gone;
    for (const b of document.querySelectorAll("main form[method=post] button")) {
      b.disabled = gone;
      b.title = gone ? "The controller does not answer" : "";
    }
    if (gone) {
      const at = new Date(fresh + skew);
      $("stale-at").dateTime = at.toISOString();
      setText($("stale-at"), at.toISOString().slice(11, 19));
      tick();
    }
  }
  const wanted = () => mark !== "paused" && !document.hidden;
  function lost() {
    open = false;
    if (!broken) broken = Date.now();
    if (wanted()) show(Date.now() - broken >= STALE_MS ? "stale" : "reconnecting");
  }

  // ---- refetching --------------------------------------------------------
  // An event is only a hint. The page is read again, at most once per
  // THROTTLE_MS and never twice at a time, and each live region is morphed in
  // place, so that focus, selection, typed text and open details stay.
  let busy = false, again = false, timer = 0;
  const hint = () => { if (wanted() && !timer) timer = setTimeout(refresh, THROTTLE_MS); };
  async function refresh() {
    clearTimeout(timer);
    timer = 0;
    const url = document.body.dataset.refresh;
    if (!url || document.hidden) return;
    if (busy) { again = true; return; }
    busy = true;
    const began = Date.now();
    try {
      const r = await fetch(url, { headers: { "X-Headgate-Live": "1" }, signal: AbortSignal.timeout(10000) });
      if (r.status === 401) { location.reload(); return; }
      const html = await r.text();
      if (r.status >= 500) throw new Error(r.statusText);
      if (r.headers.has("Date")) skew = Math.abs(Date.parse(r.headers.get("Date")) - Date.now()) > 2000 ? Date.parse(r.headers.get("Date")) - Date.now() : 0;
      if (mark !== "paused") await take(new DOMParser().parseFromString(html, "text/html"));
      fresh = Date.now();
      if (open && wanted()) show("live");
    } catch { lost(); } finally {
      busy = false;
      if (again) { again = false; setTimeout(hint, 2 * (Date.now() - began)); }
    }
  }
  async function take(doc) {
    if (doc.body.dataset.refresh) document.body.dataset.refresh = doc.body.dataset.refresh;
    document.title = doc.title;
    for (const el of document.querySelectorAll("[data-live]")) {
      const next = doc.getElementById(el.id);
      if (!next) continue;
      for (const rows of next.querySelectorAll("[data-rows]")) keepOrder(rows);
      prepare(next);
      await htmx.swap({ text: next.innerHTML, target: el, sourceElement: el, swap: "innerMorph ignoreTitle:true", transition: false });
    }
    tick();
    follow();
  }
  // Rows of a list that is sorted by attention keep their place: new content
  // in the old order, and a link that says how many would move.
  function keepOrder(next) {
    const now = $(next.id);
    if (!now) return;
    const fresh = new Map([...next.tBodies].map((b, i) => [b.id, { b, i }]));
    const kept = [...now.tBodies].filter((b) => fresh.has(b.id));
    let moved = fresh.size - kept.length, at = 0;
    for (const b of kept) {
      if (fresh.get(b.id).i !== at++) moved++;
    }
    for (const b of [...next.tBodies]) b.remove();
    for (const b of kept) next.append(fresh.get(b.id).b);
    const news = next.parentElement.querySelector(".news");
    if (news && moved) {
      news.hidden = false;
      news.firstElementChild.textContent = `${moved} ${moved === 1 ? "row" : "rows"} ${next.dataset.rows}`;
    }
  }

  // ---- the stream --------------------------------------------------------
  // hx-sse keeps the connection: it resumes after the last event and closes
  // while the tab is hidden. Its first connection is not retried by it.
  function connect() {
    if (!stream || document.hidden || (stream._htmx && stream._htmx.sse)) return;
    htmx.ajax("GET", stream.getAttribute("hx-sse:connect"), { source: stream });
  }
  let first = true;
  document.addEventListener("htmx:sse:after:connection", () => {
    const back = !first;
    open = true; broken = 0; first = false;
    if (mark !== "paused") show("live");
    if (back) refresh();
  });
  document.addEventListener("htmx:sse:before:connection", (e) => { if (e.detail.connection.attempt > 0 && !document.hidden) lost(); });
  document.addEventListener("htmx:sse:error", lost);
  document.addEventListener("htmx:sse:close", () => { if (!document.hidden) lost(); });
  document.addEventListener("htmx:error", (e) => { if (e.target === stream) lost(); });
  document.addEventListener("htmx:response:error", (e) => { if (e.target === stream) lost(); });
  document.addEventListener("htmx:sse:before:message", (e) => {
    e.preventDefault(); // notes are for us, not for the page
    if (e.detail.message.event === "task.output") follow(); else hint();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    broken = 0;
    refresh();
  });
  // Sentences hold numbers that no event announces, and a connection can die
  // without a word: a quiet page is read again now and then.
  function probe() {
    if (document.hidden || !stream) return;
    if (broken) {
      lost();
      if (Date.now() - broken > 2000) connect();
      return;
    }
    if (wanted() && Date.now() - fresh > QUIET_MS) refresh();
  }

  // ---- output ------------------------------------------------------------
  let reading = false;
  async function follow() {
    const log = $("log"), next = log && log.querySelector("[data-next]");
    if (!next || reading || next.hasAttribute("data-full") || document.hidden || mark === "paused") return;
    reading = true;
    try {
      const r = await fetch(`${log.dataset.more}?from=${next.dataset.next}`, { headers: { "X-Headgate-Live": "1" }, signal: AbortSignal.timeout(10000) });
      if (!r.ok) return;
      const part = new DOMParser().parseFromString(await r.text(), "text/html");
      if (part.querySelector("[data-reset]")) { location.reload(); return; }
      const stick = $("follow") ? $("follow").checked : false;
      for (const el of log.querySelectorAll("[data-open], [data-next]")) el.remove();
      log.append(...part.body.childNodes);
      if (stick) log.scrollTop = log.scrollHeight;
    } catch { /* the next hint tries again */ } finally { reading = false; }
  }
  document.addEventListener("scroll", (e) => {
    const log = e.target;
    if (log.id !== "log" || !$("follow")) return;
    $("follow").checked = log.scrollTop + log.clientHeight >= log.scrollHeight - 24;
  }, true);

  // ---- copying, asking, forms, keys ---------------------------------------
  // Controls that need this file are hidden until it runs.
  function prepare(part) {
    for (const el of part.querySelectorAll("[data-copy], [data-js]")) el.hidden = false;
  }
  function copied(button) {
    const say = button.getAttribute("aria-label") ? "aria-label" : null;
    const before = say ? button.getAttribute(say) : button.textContent;
    const set = (t) => { if (say) { button.setAttribute(say, t); button.title = t; } else button.textContent = t; };
    set("Copied");
    setTimeout(() => set(before), 1500);
  }
  function copy(button) {
    const from = button.dataset.copy;
    const el = from ? document.querySelector(from) : button.closest(".cmd, section").querySelector("pre, code");
    if (navigator.clipboard) {
      navigator.clipboard.writeText(el.textContent).then(() => copied(button));
      return;
    }
    const box = document.createElement("textarea"); // pages over plain HTTP have no clipboard
    box.value = el.textContent;
    box.className = "vh";
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
    copied(button);
  }
  function ask(button) {
    const d = document.createElement("dialog");
    d.setAttribute("aria-labelledby", "ask");
    d.innerHTML = '<form method="dialog" class="pad stack"><h2 id="ask"></h2><p class="row"><button class="btn danger" value="yes">Cancel the task</button><button class="btn" autofocus>Keep it</button></p></form>';
    d.querySelector("h2").textContent = button.dataset.ask;
    const { action } = button.form; // the row may be replaced while the question is open
    d.addEventListener("close", () => {
      d.remove();
      if (d.returnValue !== "yes") return;
      const f = document.createElement("form");
      f.method = "post";
      f.action = action;
      document.body.append(f);
      f.submit();
    });
    document.body.append(d);
    d.showModal();
  }
  document.addEventListener("click", (e) => {
    const button = e.target.closest("button");
    if (!button) return;
    if (button.hasAttribute("data-copy")) copy(button);
    if (button.dataset.ask) { e.preventDefault(); ask(button); }
    if (button.id === "stale-try") { connect(); refresh(); }
    if (button.id === "mark") {
      if (mark !== "paused") { show("paused"); return; }
      show(open ? "live" : "reconnecting");
      refresh();
      follow();
    }
  });
  // Another agent, kind or program has other arguments: the form is read anew
  // with what is filled in. Other changes only renew the command beside it.
  const form = $("run");
  let typing = 0;
  function reload(parts) {
    const q = new URLSearchParams(new FormData(form));
    fetch(form.action + "?" + q, { headers: { "X-Headgate-Live": "1" } }).then((r) => r.ok ? r.text() : "").then(async (html) => {
      if (!html) return;
      const doc = new DOMParser().parseFromString(html, "text/html");
      for (const id of parts) {
        const next = doc.getElementById(id);
        if (!next) continue;
        prepare(next);
        await htmx.swap({ text: next.innerHTML, target: $(id), sourceElement: $(id), swap: "innerMorph ignoreTitle:true" });
      }
    });
  }
  if (form) {
    form.addEventListener("change", (e) => { if (e.target.hasAttribute("data-reload")) reload(["run"]); });
    form.addEventListener("input", (e) => {
      clearTimeout(typing);
      if (!e.target.hasAttribute("data-reload")) typing = setTimeout(reload, 300, ["preview"]);
    });
  }
  document.addEventListener("keydown", (e) => {
    if (e.key !== "/" || e.ctrlKey || e.metaKey || e.altKey || e.target.closest("input, textarea, select")) return;
    const box = $("filter") || $("find");
    if (box && box.offsetParent) { e.preventDefault(); box.focus(); box.select(); }
  });

  // Open details stay open when their region is replaced.
  htmx.registerExtension("headgate", {
    htmx_before_morph_attr: (el, detail) => !(detail.attrName === "open" && (el.tagName === "DETAILS" || el.tagName === "DIALOG")),
  });

  prepare(document);
  tick();
  setInterval(tick, 1000);
  setInterval(probe, 1000);
  if (stream) {
    broken = Date.now(); // until the first connection
    setTimeout(() => { if (!open) lost(); }, STALE_MS);
  }
  if ($("log") && $("follow")) $("log").scrollTop = $("log").scrollHeight;
})();
