// Asks the search of a built site, as its pages do: its own worker reads its own index.
//
//     node tests/docs/search.js SITE/ QUERY...
//
// Prints a line of JSON: for each query the addresses of the pages that are found, the best first.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json"), "utf8"));
const scripts = [site, path.join(site, "..")].map((top) => path.join(top, "assets", "javascripts"));
const workers = path.join(scripts.find((folder) => fs.existsSync(folder)), "workers");

let hear; // what the worker calls with its answer
let ask; // what the worker has to hear a question
const browser = {
  addEventListener: (_, listener) => (ask = listener),
  postMessage: (message) => hear(message),
  importScripts: (...names) => names.forEach((name) => run(path.join(workers, name))),
  console,
};
browser.self = browser;
vm.createContext(browser);
const run = (file) => vm.runInContext(fs.readFileSync(file, "utf8"), browser);
run(path.join(workers, fs.readdirSync(workers).find((name) => name.endsWith(".min.js"))));

// The kinds of messages: 0 sets it up, 2 is a question. The answers come back in order.
const answer = (type, data) =>
  new Promise((resolve) => {
    hear = resolve;
    ask({ data: { type, data } });
  });

(async () => {
  await answer(0, { ...index, options: { suggest: false } });
  const found = {};
  for (const query of queries) {
    const { items } = (await answer(2, query)).data;
    found[query] = items.map(([best]) => best.location.split("#")[0]);
  }
  console.log(JSON.stringify(found));
})();
