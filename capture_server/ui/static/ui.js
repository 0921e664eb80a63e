// Live pages: every two seconds the page's content is fetched again and put in place of the old,
// while the tab is seen. Without scripts everything works but this.
"use strict";

const EVERY_MS = 2000;
const box = document.getElementById("live");
box.checked = sessionStorage.getItem("live") === "1";
box.addEventListener("change", () => sessionStorage.setItem("live", box.checked ? "1" : "0"));

async function refresh() {
  const active = document.activeElement;
  // Nothing moves under somebody who types.
  if (!box.checked || document.hidden || /^(INPUT|SELECT)$/.test(active.tagName) && active !== box) return;
  const response = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!response.ok || response.redirected) return;
  const fresh = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("main");
  const old = document.getElementById("main");
  if (!fresh || fresh.innerHTML === old.innerHTML) return;
  const focused = active.id;
  old.replaceChildren(...fresh.childNodes);
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

setInterval(() => refresh().catch((error) => console.warn("not refreshed:", error)), EVERY_MS);
