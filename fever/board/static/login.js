// Exchanges the token for a cookie, then opens the page.

const field = document.getElementById("token");
const problem = document.getElementById("problem");

async function open() {
  problem.textContent = "";
  const answer = await fetch("/login", { method: "POST", body: field.value });
  if (answer.ok) {
    location.assign("/");
  } else {
    problem.textContent = (await answer.json()).error;
    field.select();
  }
}

document.getElementById("open").addEventListener("click", open);
field.addEventListener("keydown", (event) => {
  if (event.key === "Enter") open();
});
