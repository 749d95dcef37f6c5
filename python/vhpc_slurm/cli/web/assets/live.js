// SPDX-License-Identifier: Apache-2.0
// Replaces the parts of the page that have changed, every few seconds while the page is visible.
"use strict";

(() => {
  const EVERY_MS = 3000;
  const LONGEST_MS = 30000;
  const WAIT_MS = 10000;
  const lost = document.getElementById("lost");
  const pause = document.getElementById("pause");
  const filter = document.getElementById("filter");
  let timer = 0;
  let pauseMs = EVERY_MS;
  let stopped = false;
  let busy = false;

  const say = (words) => {
    lost.textContent = words;
    lost.hidden = words === "";
  };

  const applyFilter = () => {
    const wanted = filter ? filter.value.trim().toLowerCase() : "";
    for (const row of document.querySelectorAll("#jobs tbody tr")) {
      row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
    }
  };

  // Focus and the position of scrolled tables must not be lost when a part is replaced.
  const replace = (old, fresh) => {
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const address = focused ? focused.getAttribute("href") : null;
    const label = focused ? focused.getAttribute("aria-label") : null;
    const offsets = [...old.querySelectorAll(".wide")].map((part) => part.scrollLeft);
    old.replaceWith(fresh);
    fresh.querySelectorAll(".wide").forEach((part, place) => {
      part.scrollLeft = offsets[place] || 0;
    });
    if (focused) {
      const same = [...fresh.querySelectorAll("a, [tabindex]")].find((one) =>
        address === null ? one.getAttribute("aria-label") === label : one.getAttribute("href") === address);
      if (same) {
        same.focus({ preventScroll: true });
      }
    }
  };

  const update = (text) => {
    const page = new DOMParser().parseFromString(text, "text/html");
    for (const old of document.querySelectorAll("[data-live]")) {
      const fresh = page.getElementById(old.id);
      if (fresh && fresh.outerHTML !== seen.get(old.id)) {
        seen.set(old.id, fresh.outerHTML);
        replace(old, document.adoptNode(fresh));
      }
    }
    applyFilter();
  };

  const seen = new Map();
  for (const part of document.querySelectorAll("[data-live]")) {
    seen.set(part.id, part.outerHTML);
  }

  const plan = () => {
    window.clearTimeout(timer);
    if (!stopped && !document.hidden) {
      timer = window.setTimeout(look, pauseMs);
    }
  };

  const look = async () => {
    if (busy) {
      return;
    }
    busy = true;
    try {
      const answer = await fetch(window.location.href, {
        credentials: "same-origin", redirect: "error", signal: AbortSignal.timeout(WAIT_MS),
      });
      if (answer.ok || answer.status === 404) {
        update(await answer.text());
        pauseMs = EVERY_MS;
        say("");
      } else {
        say((await answer.text()).trim() || `vhpc web answers with status ${answer.status}`);
        pauseMs = Math.min(2 * pauseMs, LONGEST_MS);
      }
    } catch (_) {
      say("vhpc web does not answer; this page shows what it showed before and tries again");
      pauseMs = Math.min(2 * pauseMs, LONGEST_MS);
    } finally {
      busy = false;
      plan();
    }
  };

  const now = () => {
    if (!stopped && !document.hidden) {
      window.clearTimeout(timer);
      look();
    }
  };

  document.addEventListener("visibilitychange", () => (document.hidden ? window.clearTimeout(timer) : now()));
  pause.hidden = false;
  pause.addEventListener("click", () => {
    stopped = !stopped;
    pause.setAttribute("aria-pressed", String(stopped));
    pause.textContent = stopped ? "Resume updates" : "Pause updates";
    if (stopped) {
      window.clearTimeout(timer);
    } else {
      now();
    }
  });
  if (filter) {
    filter.hidden = false;
    filter.addEventListener("input", applyFilter);
    applyFilter();
  }
  plan();
})();
