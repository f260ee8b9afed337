"use strict";
const rounds = [...document.querySelectorAll(".round")];
const blocks = [...document.querySelectorAll(".answer a")];
const place = document.getElementById("place");
const [back, on, all] = ["back", "on", "all"].map((id) => document.getElementById(id));
let current = 0;

// Without this script every round stands on the page, one below the other.
function show(index, scroll) {
  current = Math.max(0, Math.min(rounds.length - 1, index));
  rounds.forEach((round, i) => round.classList.toggle("current", i === current));
  blocks.forEach((block, i) => {
    block.classList.toggle("current", i === current);
    block.classList.toggle("ahead", i > current);
  });
  place.textContent = `round ${current + 1} of ${rounds.length}`;
  back.disabled = current === 0;
  on.disabled = current === rounds.length - 1;
  const round = rounds[current];
  // In a narrow window, begin where the round stopped if that is out of sight.
  const tree = round.querySelector(".tree");
  const stop = round.querySelector(".node.target").getBBox();
  tree.scrollLeft = Math.max(0, stop.x + stop.width + 24 - tree.clientWidth);
  const box = blocks[current].parentElement;
  const top = blocks[current].offsetTop - box.offsetTop;
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 24) {
    box.scrollTop = top - box.clientHeight / 2;
  }
  if (scroll && !document.documentElement.classList.contains("steps")) {
    round.scrollIntoView({ block: "start" });
  }
  history.replaceState(null, "", `#round-${current + 1}`);
}

function fromHash(scroll) {
  const match = /^#round-(\d+)$/.exec(location.hash);
  show(match ? Number(match[1]) - 1 : 0, scroll);
}

if (rounds.length) {
  const page = document.documentElement;
  page.classList.add("scripted", "steps");
  // The one round on show needs no scrolling to, and a browser would.
  rounds.forEach((round) => round.removeAttribute("id"));
  fromHash(false);
  addEventListener("hashchange", () => fromHash(true));
  back.addEventListener("click", () => show(current - 1, true));
  on.addEventListener("click", () => show(current + 1, true));
  all.addEventListener("click", () => {
    const steps = page.classList.toggle("steps");
    all.setAttribute("aria-pressed", String(!steps));
    show(current, true);
  });
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const to = {
      ArrowLeft: current - 1,
      ArrowRight: current + 1,
      Home: 0,
      End: rounds.length - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    show(to, true);
  });
  for (const round of rounds) {
    const detail = round.querySelector(".detail");
    detail.textContent = "Point at a token for its score.";
    const say = (event) => {
      const node = event.target.closest(".node");
      if (node) detail.textContent = node.firstChild.textContent.replaceAll("\n", "  ·  ");
    };
    round.querySelector("svg").addEventListener("pointerover", say);
    round.querySelector("svg").addEventListener("click", say);
  }
}
