// The head of a run: what it is, how far it is, and how to stop or continue it.

import { copyButton, h, hasHidden, setAttribute, setText, theirs, visible } from "../core/dom.js";
import * as format from "../core/format.js";
import { join } from "../core/lists.js";
import { link } from "../core/route.js";
import { lastOf } from "../charts/smooth.js";
import { badge } from "../core/state.js";

const MET = new Set(["reward", "steps", "iterations", "time", "trials"]); // stop rules: to go on takes another one
const FIGURES = ["Return", "Evaluation", "Steps", "Steps/s", "Training time", "Episodes", "Updated"];

/** A word of a shell command, quoted where it must be. */
function quoted(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** [what it does, command] for a person to type in a terminal. */
function commandsFor(row, path, stopReason) {
  if (hasHidden(path)) return []; // a terminal might obey what is in this name
  const run = quoted(path);
  const stop = `fever stop ${quoted(row.name)}`;
  if (row.kind === "scaling") return [];
  if (row.kind === "search") return MET.has(stopReason) ? [] : [["Continue the search", `fever resume ${run} --trust`]];
  if (row.elsewhere && ["running", "queued"].includes(row.state))
    return [
      ["Stop", stop],
      ["Follow", `fever attach ${quoted(row.name)}`],
    ];
  if (row.state === "running")
    return [
      ["Stop", "Ctrl-C in its terminal"],
      ["Continue later", `fever resume ${run}`],
    ];
  if (row.state === "damaged" || row.state === "queued") return [];
  return [
    ...(MET.has(stopReason) ? [] : [["Continue", `fever resume ${run}`]]),
    ["Evaluate", `fever eval ${run}`],
    ["Make a video", `fever watch ${run}`],
  ];
}

/** How much of the way to its nearest stop rule a run is: {name, share (0 to 1), limit (text)}; null without rules. */
function progressOf(row, config) {
  const rules = [
    ["steps", row.steps, format.count],
    ["seconds", row.seconds, format.shortDuration],
    ["iterations", row.iteration, format.count],
  ];
  const known = rules.flatMap(([name, done, write]) => {
    const setting = config.find((each) => each.group === "stop" && each.name.replace(/^stop\./, "") === name);
    const limit = Number(setting?.value ?? NaN);
    const usable = limit > 0 && Number.isFinite(done);
    return usable ? [{ name, share: Math.min(1, done / limit), limit: write(limit) }] : [];
  });
  return known.sort((a, b) => b.share - a.share)[0] ?? null;
}

export class Header {
  constructor() {
    this.badge = badge();
    this.title = h("h1", { tabindex: "-1" });
    this.about = h("p.about.muted", {});
    this.reason = h("p.reason", { hidden: true });
    this.figures = new Map(
      FIGURES.map((name) => [name, { value: h("dd", {}, "–"), note: h("dd.figure-note.muted", {}) }]),
    );
    this.bar = h(
      "div.progress",
      {
        role: "progressbar",
        "aria-label": "Progress to the stop rule",
        "aria-valuemin": "0",
        "aria-valuemax": "100",
        hidden: true,
      },
      h("span", {}),
    );
    this.commands = h("div.commands", {});
    this.related = h("p.related", {});
    const figures = [...this.figures].map(([name, parts]) =>
      h("div.figure", { "data-figure": name }, h("dt", {}, name), parts.value, parts.note),
    );
    this.list = h("dl.figures", {}, ...figures);
    this.element = h(
      "header.run-head",
      {},
      h("div.run-title", {}, this.title, this.badge.element),
      this.about,
      this.reason,
      this.bar,
      this.list,
      this.related,
      this.commands,
    );
    this.updated = format.moment(null);
    this.figures.get("Updated").value.replaceChildren(this.updated);
  }

  /** Before anything is known but the name. */
  writeName(id) {
    setText(this.title, visible(id.split("/").at(-1), 300));
  }

  update(row, info) {
    this.list.hidden = ["search", "scaling"].includes(row.kind); // their runs have figures
    if (this.name !== row.name) {
      this.name = row.name;
      this.title.replaceChildren(theirs(row.name, 300));
    }
    this.badge.update(row);
    this.writeAbout(row);
    this.writeReason(row);
    const write = (name, text, note = "") => {
      const parts = this.figures.get(name);
      setText(parts.value, text);
      setText(parts.note, note);
    };
    write("Return", format.number(row.return), Number.isFinite(row.goal) ? `goal ${format.number(row.goal)}` : "");
    const evaluation = row.evaluation ?? lastOf(info?.evaluations.mean);
    write("Evaluation", format.number(evaluation), evaluation === null ? "" : "last one");
    write("Steps/s", format.count(row.steps_per_second));
    write("Training time", format.duration(row.seconds));
    write("Episodes", format.count(row.episodes), row.iteration ? `${format.count(row.iteration)} iterations` : "");
    format.setMoment(this.updated, row.updated);
    this.writeProgress(row, info, write);
    if (info) this.writeCommands(row, info);
  }

  /** Why it ended: beside the state, or as a sentence of its own if something went wrong. */
  writeReason(row) {
    const reason = row.reason && row.state !== "running" ? row.reason : "";
    const grave = ["failed", "damaged"].includes(row.state);
    this.reason.hidden = !reason;
    this.reason.classList.toggle("grave", grave);
    setText(this.reason, visible(reason, 600));
    if (grave) this.about.after(this.reason);
    else this.badge.element.after(this.reason);
  }

  writeProgress(row, info, write) {
    const progress = info && progressOf(row, info.config);
    const goal = progress && `of ${progress.limit}`;
    write("Steps", format.count(row.steps), progress?.name === "steps" ? goal : "");
    this.figures.get("Training time").note.textContent = progress?.name === "seconds" ? goal : "";
    this.bar.hidden = !progress || row.state === "done";
    if (!progress) return;
    this.bar.firstElementChild.style.width = `${100 * progress.share}%`;
    setAttribute(this.bar, "aria-valuenow", Math.round(100 * progress.share));
    setAttribute(this.bar, "title", `${format.percent(progress.share)} ${goal} ${progress.name}`);
  }

  writeAbout(row) {
    const words = [
      row.env,
      row.algo,
      row.seed !== null && `seed ${row.seed}`,
      row.workers !== null && `workers ${row.workers}`,
      row.host && `on ${row.host}`,
    ];
    const text = JSON.stringify([words, row.began]);
    if (text === this.aboutBefore) return;
    this.aboutBefore = text;
    const parts = words.filter(Boolean).flatMap((word) => [theirs(word, 120), " · "]);
    this.about.replaceChildren(...parts, ...(row.began === null ? [] : ["began ", format.moment(row.began)]));
  }

  writeCommands(row, info) {
    const commands = commandsFor(row, info.path, info.summary?.stop_reason);
    const text = JSON.stringify([commands, info.siblings, info.trials, row.parent]);
    if (text === this.commandsBefore) return;
    this.commandsBefore = text;
    this.commands.replaceChildren(
      ...commands.map(([what, command]) =>
        h(
          "div.command",
          {},
          h("span.muted", {}, what),
          h("code", { title: visible(command, 1000) }, visible(command, 400)),
          command.startsWith("fever") && copyButton(command),
        ),
      ),
    );
    const related = [];
    if (row.parent)
      related.push(
        h(
          "a",
          { href: link("run", row.parent) },
          "Its ",
          row.kind === "trial" ? "search" : "study",
          ": ",
          theirs(row.parent, 80),
        ),
      );
    if (info.siblings?.length > 1)
      related.push(
        h(
          "a",
          { href: link("compare", null, { runs: join(info.siblings), band: "1" }) },
          `Compare the ${info.siblings.length} runs of this experiment`,
        ),
      );
    if (info.trials?.length > 1)
      related.push(
        h("a", { href: link("compare", null, { runs: join(info.trials) }) }, `Compare its ${info.trials.length} runs`),
      );
    this.related.replaceChildren(...related);
    this.related.hidden = !related.length;
  }
}
