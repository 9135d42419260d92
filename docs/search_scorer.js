// Order of search results: pages whose headings have the words of the question, how-to pages before
// guides, and lists of everything last. Where few pages have all words, pages with some of them follow;
// a rare word counts more than a frequent one.
const FEW = 10; // pages with all words, below which pages with some of them are added

const pagesOf = (index, word) => new Set([index[word] ?? []].flat());

// the words of a question with their weights, and the pages with each in the text and in headings
const readWords = (words) => {
  const { docnames, terms, titleterms } = Search._index;
  return [...words].map((word) => {
    const inHeadings = pagesOf(titleterms, word);
    const inText = new Set([...pagesOf(terms, word), ...inHeadings]);
    return { inText, inHeadings, weight: Math.log((1 + docnames.length) / (1 + inText.size)) };
  });
};

// the share of the words that a page has, by weight
const share = (words, name, page) => {
  const sum = (some) => some.reduce((total, word) => total + word.weight, 0);
  return sum(words.filter((word) => word[name].has(page))) / (sum(words) || 1);
};

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

    const page = Search._index.docnames.indexOf(docname);
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const words = readWords(Search._parseQuery(query)[1]);
    const missing = score < 0 ? 1 - share(words, "inText", page) : 0;
    return 5 + place + 20 * share(words, "inHeadings", page) - 20 * missing;
  },
};

// pages with some of the words, where few have all
const findAll = Search.performTermsSearch;
Search.performTermsSearch = (searchTerms, excludedTerms) => {
  const results = findAll(searchTerms, excludedTerms);
  if (results.length >= FEW || searchTerms.size < 2) return results;
  const found = new Map(results.map((result) => [result[0], result]));
  for (const word of searchTerms)
    for (const result of findAll(new Set([word]), excludedTerms))
      if (!found.has(result[0])) found.set(result[0], [...result.slice(0, 4), -1, ...result.slice(5)]);
  return [...found.values()];
};
