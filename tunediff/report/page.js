(function () {
  "use strict";
  var table = document.getElementById("trials-table");
  if (!table) return;
  var body = table.tBodies[0], rows = Array.from(body.rows), heads = Array.from(table.tHead.rows[0].cells);
  function key(row, column) {
    var text = row.cells[column].textContent.trim().replace(/^≥ /, "").replace(/^−/, "-");
    return { text: text, number: /^[-+\d.]/.test(text) ? parseFloat(text.replace(/,/g, "")) : NaN };
  }
  function order(a, b) {
    if (!a.text || !b.text) return (a.text ? 0 : 1) - (b.text ? 0 : 1);
    if (!isNaN(a.number) && !isNaN(b.number)) return a.number - b.number;
    return a.text < b.text ? -1 : a.text > b.text ? 1 : 0;
  }
  heads.forEach(function (head, column) {
    var button = document.createElement("button");
    button.type = "button";
    button.className = "sorter";
    while (head.firstChild) button.appendChild(head.firstChild);
    head.appendChild(button);
    button.addEventListener("click", function () {
      var up = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      rows.map(function (row) { return { row: row, key: key(row, column) }; })
        .sort(function (a, b) {
          var empty = (a.key.text ? 0 : 1) - (b.key.text ? 0 : 1);
          return empty || (up ? order(a.key, b.key) : order(b.key, a.key));
        })
        .forEach(function (item) { body.appendChild(item.row); });
    });
  });
  var box = document.getElementById("trials-filter"), count = document.getElementById("trials-count");
  document.querySelector("#trials .filter").hidden = false;
  box.addEventListener("input", function () {
    var words = box.value.toLowerCase().split(/\s+/).filter(Boolean), shown = 0;
    rows.forEach(function (row) {
      var text = (row.dataset.text = row.dataset.text || row.textContent.toLowerCase());
      row.hidden = !words.every(function (word) { return text.indexOf(word) >= 0; });
      shown += row.hidden ? 0 : 1;
    });
    count.textContent = shown + " of " + rows.length;
  });
})();
