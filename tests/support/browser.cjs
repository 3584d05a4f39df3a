// Opens a page in Chromium as a phone and as a computer, and prints what it found as JSON: node browser.cjs CHROMIUM PAGE
const puppeteer = require("puppeteer-core");
const axe = require("axe-core").source;

// What is wrong with the page, in words; it runs inside the page. Faults of print are those of a page on paper.
function faults(printed) {
  const found = [];
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) found.push("the page scrolls sideways");
  const outside = (element) => element.getClientRects().length && element.getBoundingClientRect().right > width + 1;
  const shown = printed ? "body *" : "p, h1, h2, h3, caption, summary, figure, figure svg, pre, li, nav a";
  for (const element of document.querySelectorAll(shown)) {
    if (!element.closest("svg *") && element.checkVisibility() && outside(element)) {
      found.push(`outside the page: ${element.outerHTML.slice(0, 150)}`);
    }
  }
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    for (const number of texts.currentNode.data.matchAll(/[\d.,]+%?\s±\s[\d.,]+/g)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, number.index);
      range.setEnd(texts.currentNode, number.index + number[0].length);
      const tops = [...range.getClientRects()].map((each) => Math.round(each.top));
      if (new Set(tops).size > 1) found.push(`wraps: ${number[0]}`);
    }
  }
  for (const picture of document.querySelectorAll("figure svg")) {
    const box = picture.getBoundingClientRect();
    const visible = picture.checkVisibility({contentVisibilityAuto: true, checkVisibilityCSS: true});
    if (printed && !(visible && box.height > 50)) found.push(`not printed: ${picture.getAttribute("aria-label")}`);
    for (const text of visible ? picture.querySelectorAll("text") : []) {
      const {left, right} = text.getBoundingClientRect();
      if (left < box.left - 1 || right > box.right + 1) found.push(`outside its picture: ${text.textContent}`);
    }
  }
  return found;
}

async function look(browser, file, width, scheme) {
  const tab = await browser.newPage();
  const requests = [], messages = [];
  tab.on("request", (request) => requests.push(request.url()));
  tab.on("console", (message) => messages.push(message.text()));
  await tab.emulateMediaFeatures([{name: "prefers-color-scheme", value: scheme}]);
  await tab.setViewport({width, height: 800, isMobile: width < 500, hasTouch: width < 500});
  await tab.goto(`file://${file}`);
  const found = [];
  for (const open of [false, true]) {
    await tab.evaluate((open) => document.querySelectorAll("details").forEach((each) => { each.open = open; }), open);
    found.push(...await tab.evaluate(faults, false));
    await tab.evaluate(axe);
    const {violations} = await tab.evaluate(() => window.axe.run());
    found.push(...violations.map((each) => `${each.id}: ${each.nodes[0].html.slice(0, 150)}`));
  }
  const others = requests.filter((url) => url !== `file://${file}` && !url.startsWith("data:"));
  await tab.close();
  return [...found, ...others.map((url) => `requests ${url}`), ...messages];
}

// A4 at 96 dots an inch, with margins of 1 cm; the sections are closed.
async function print(browser, file) {
  const tab = await browser.newPage();
  await tab.goto(`file://${file}`);
  await tab.emulateMediaType("print");
  await tab.setViewport({width: 718, height: 1047});
  const found = await tab.evaluate(faults, true);
  await tab.close();
  return found;
}

(async () => {
  const [chromium, file] = process.argv.slice(2);
  const browser = await puppeteer.launch({executablePath: chromium, args: ["--no-sandbox", "--disable-dev-shm-usage"]});
  const found = {};
  for (const width of [1280, 390]) {
    for (const scheme of ["light", "dark"]) found[`${width} ${scheme}`] = await look(browser, file, width, scheme);
  }
  found.print = await print(browser, file);
  await browser.close();
  console.log(JSON.stringify(found));
})();
