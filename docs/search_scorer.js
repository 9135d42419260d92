// Order of search results: pages whose headings have the words of the question, how-to pages before
// guides, and lists of everything last.
var Scorer = {
  objNameMatch: 11, // Sphinx's own values, which it takes from here
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,

  score: ([docname, title, anchor, description, score, filename, kind]) => {
    if (kind === "object") return score;
    const kinds = [
      [/(^|\/)index$|^project\/|^code\//, -8],
      [/^guides\/from_/, -4],
      [/^howto\//, 6],
      [/^guides\//, 2],
    ];
    const place = (kinds.find(([pattern]) => pattern.test(docname)) || [null, 0])[1];
    if (kind === "title") return score + place + 12;

    const {docnames, titleterms} = Search._index;
    const page = docnames.indexOf(docname);
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const words = [...Search._parseQuery(query)[1]];
    const inHeadings = words.filter((word) => [titleterms[word]].flat().includes(page));
    return 5 + place + (15 * inHeadings.length) / words.length;
  },
};
