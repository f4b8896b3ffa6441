"""In a real JupyterLab: an exercise by keyboard, a start page whose links open notebooks, and projector mode."""

from __future__ import annotations

from tests.browser import assert_no_errors
from tests.patience import until
from tools.notebooks.page import LabSession

EXERCISES = """# %%
from workbench import widgets

pages = 4
number = widgets.Exercise("How many pages?", lambda: pages, unit="pages", hint="Count them.", because="Four it is.")
number

# %%
choice = widgets.Exercise(answer=lambda: "b", choices=["a", "b", "c"], because="It is b.")
choice
"""
DESCRIBED = """# %% [markdown]
# # {title}: a notebook
#
# - **Questions**: What is {title}?
# - **Afterwards you can**: say it; do it.
# - **Minutes**: 10

# %%
1 + 1
"""
START = """# %%
from workbench import widgets

widgets.Course()

# %%
switch = widgets.Course(projector=False)
switch

# %%
widgets.TokenView("def add(a, b):")
"""


def test_an_exercise_is_answered_by_keyboard_alone(lab: LabSession) -> None:
    page = lab.open(lab.write("exercises.py", EXERCISES))
    page.run_all()
    assert_no_errors(page)
    number, choice = page.widget("wb-exercise").nth(0), page.widget("wb-exercise").nth(1)
    status = number.get_by_role("status")
    field = number.get_by_label("Your answer, in pages")
    cells = page.evaluate("len(In)")
    field.press_sequentially("dd3jk")  # letters that JupyterLab binds in command mode
    field.press("Enter")
    status.get_by_text("Type a number in pages").wait_for()
    assert page.evaluate("number.feedback.tries") == "()" and len(page.document()["cells"]) == 2
    for given, words in (("3", "Not yet"), ("4", "Four it is.")):
        field.fill(given)
        field.press("Enter")
        status.get_by_text(words).wait_for()
    page.settle()
    assert page.evaluate("number.right, len(number.feedback.tries)") == "(True, 2)"
    assert number.get_by_role("button", name="Check").count() == 0
    number.get_by_role("button", name="Try again").press("Enter")
    until(lambda: page.evaluate("number.form.closed") == "False")
    number.get_by_role("button", name="Hint").press("Enter")
    status.get_by_text("Count them.").wait_for()

    group = choice.get_by_role("group", name="Your answer")
    group.get_by_role("radio", name="a").focus()
    page.tab.keyboard.press("ArrowDown")
    assert group.get_by_role("radio", name="b").is_checked()
    page.tab.keyboard.press("Enter")
    choice.get_by_role("status").get_by_text("It is b.").wait_for()
    page.settle()
    assert page.evaluate("choice.right") == "True" and page.evaluate("len(In)") >= cells
    saved = page.document()["cells"][1]["outputs"][0]["data"]["text/html"]
    assert "◉ b" in "".join(saved) and "It is b." in "".join(saved)
    assert_no_errors(page)


def test_a_title_opens_its_notebook_and_one_button_is_for_all(lab: LabSession) -> None:
    lab.write("course/01_first.py", DESCRIBED.format(title="First"))
    page = lab.open(lab.write("course/00_start.py", START))
    page.run_all()
    assert_no_errors(page)
    tab = page.tab
    course = page.widget("wb-course").first
    button = course.get_by_role("button", name="Projector mode: off")
    code = page.root.locator(".jp-CodeCell .jp-InputArea").nth(0)
    token = page.widget("wb-tokenview").locator(".wb-pic").first
    font = "node => parseFloat(getComputedStyle(node).fontSize) * node.currentCSSZoom"
    letters, lines = token.evaluate(font), code.bounding_box()
    assert lines is not None and tab.locator("body.wb-projector").count() == 0
    button.press("Enter")
    tab.locator("body.wb-projector").wait_for(state="attached")
    page.settle()
    larger, folded = token.evaluate(font), code.bounding_box()
    assert folded is not None and larger > 1.4 * letters and folded["height"] < lines["height"]
    assert page.root.get_by_role("button", name="Projector mode: on").count() == 2
    page.run_cell(2)  # a new switch that is off
    tab.locator("body:not(.wb-projector)").wait_for(state="attached")
    assert page.root.get_by_role("button", name="Projector mode: off").count() == 2
    assert abs(token.evaluate(font) - letters) < 0.01

    course.get_by_role("link", name="First").click()
    opened = "[...jupyterapp.shell.widgets('main')].map(each => each.context?.path ?? '')"
    until(lambda: "course/01_first.py" in tab.evaluate(opened))
    assert tab.url.startswith(lab.server.origin)
    assert_no_errors(page)
    # Closed without the question whether to save it, behind which the next test would wait.
    tab.evaluate(
        """async () => {
          const opened = [...jupyterapp.shell.widgets("main")];
          const first = opened.find((each) => each.context?.path === "course/01_first.py");
          await first.context.ready;
          await first.sessionContext.ready;
          await first.sessionContext.shutdown();
          first.context.model.dirty = false;
          first.close();
        }"""
    )
    assert tab.locator(".jp-Dialog").all_inner_texts() == []
