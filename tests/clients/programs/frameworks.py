"""Small agents of many frameworks: ``frameworks.py NAME`` runs the function NAME and tells the answers that it returns.

The base address and the key of the policy are in the environment, where each framework's OpenAI client looks for them.
"""

import asyncio
import inspect
import json
import os
import sys
from importlib.metadata import version

from agent import QUESTIONS, SYSTEM, TOOLS, Wire, run_tool, tell
from pydantic import BaseModel

FUNCTIONS = [{"type": "function", "function": tool} for tool in TOOLS]
USED = []
"""Distributions that the agent uses."""


class Sum(BaseModel):
    """The sum of two numbers."""

    total: int


def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: a number.
        b: a number.
    """
    return run_tool("add", {"a": a, "b": b})


def multiply(a: int, b: int) -> str:
    """Multiplies two numbers.

    Args:
        a: a number.
        b: a number.
    """
    return run_tool("multiply", {"a": a, "b": b})


def uses(*distributions):
    """Name the distributions of which an agent's versions are told."""

    def named(function):
        function.distributions = distributions
        return function

    return named


@uses("agent-framework-core", "agent-framework-openai")
async def agent_framework():
    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatCompletionClient

    agent = Agent(OpenAIChatCompletionClient(model="policy"), SYSTEM, tools=[add, multiply])
    session = agent.create_session()
    return [(await agent.run(question, session=session)).text for question in QUESTIONS]


@uses("agno")
def agno():
    from agno.agent import Agent
    from agno.db.in_memory import InMemoryDb
    from agno.models.openai import OpenAILike

    model = OpenAILike(id="policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = Agent(
        model=model, instructions=SYSTEM, tools=[add, multiply], db=InMemoryDb(), add_history_to_context=True,
        telemetry=False,
    )  # fmt: skip
    return [agent.run(question, session_id="s").content for question in QUESTIONS]


@uses("autogen-agentchat")
async def autogen():
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    abilities = {"vision": False, "function_calling": True, "json_output": True, "family": "unknown",
                 "structured_output": True, "multiple_system_messages": True}  # fmt: skip
    client = OpenAIChatCompletionClient(model="policy", model_info=abilities)
    agent = AssistantAgent(
        "calculator", client, tools=[add, multiply], system_message=SYSTEM, max_tool_iterations=5,
    )  # fmt: skip
    return [(await agent.run(task=question)).messages[-1].content for question in QUESTIONS]


@uses("atomic-agents", "instructor")
def atomic_agents():
    import instructor
    import openai
    from atomic_agents.agents.base_agent import BaseAgent, BaseAgentConfig, BaseAgentInputSchema

    config = BaseAgentConfig(client=instructor.from_openai(openai.OpenAI()), model="policy")
    agent = BaseAgent(config)
    return [agent.run(BaseAgentInputSchema(chat_message=question)).chat_message for question in QUESTIONS]


@uses("camel-ai")
def camel():
    from camel.agents import ChatAgent
    from camel.models import ModelFactory
    from camel.toolkits import FunctionTool
    from camel.utils import BaseTokenCounter

    class Counter(BaseTokenCounter):
        """Counts characters, since the framework's own counter looks its vocabulary up in the network."""

        def count_tokens_from_messages(self, messages):
            return len(str(messages))

        def encode(self, text):
            return list(map(ord, text))

        def decode(self, token_ids):
            return "".join(map(chr, token_ids))

    model = ModelFactory.create(
        "openai-compatible-model", "policy", url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"],
        token_counter=Counter(),
    )  # fmt: skip
    agent = ChatAgent(SYSTEM, model=model, tools=[FunctionTool(add), FunctionTool(multiply)])
    return [agent.step(question).msg.content for question in QUESTIONS]


@uses("crewai")
def crewai():
    from crewai import LLM, Agent
    from crewai.tools import tool

    llm = LLM(model="openai/policy")
    agent = Agent(role="calculator", goal=SYSTEM, backstory=SYSTEM, llm=llm, tools=[tool(add), tool(multiply)])
    return [agent.kickoff(question).raw for question in QUESTIONS]


@uses("dspy")
def dspy():
    import dspy

    dspy.configure(lm=dspy.LM("openai/policy", api_base=os.environ["OPENAI_BASE_URL"], cache=False))
    agent = dspy.ReAct("question -> total: int", tools=[add])
    return [agent(question=QUESTIONS[0]).total]


@uses("google-adk", "litellm")
async def google_adk():
    from google.adk.agents import LlmAgent
    from google.adk.models.lite_llm import LiteLlm
    from google.adk.runners import InMemoryRunner
    from google.genai import types

    agent = LlmAgent(
        name="calculator", model=LiteLlm("openai/policy"), instruction=SYSTEM, tools=[add, multiply]
    )
    runner = InMemoryRunner(agent, app_name="a")
    await runner.session_service.create_session(app_name="a", user_id="u", session_id="s")
    answers = []
    for question in QUESTIONS:
        message = types.Content(role="user", parts=[types.Part(text=question)])
        events = [event async for event in runner.run_async(user_id="u", session_id="s", new_message=message)]
        answers.append(events[-1].content.parts[-1].text)
    return answers


@uses("haystack-ai")
def haystack():
    from haystack.components.agents import Agent
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.tools import create_tool_from_function

    generator = OpenAIChatGenerator(model="policy", api_base_url=os.environ["OPENAI_BASE_URL"])
    tools = [create_tool_from_function(add), create_tool_from_function(multiply)]
    agent = Agent(chat_generator=generator, tools=tools, system_prompt=SYSTEM)
    messages, answers = [], []
    for question in QUESTIONS:
        messages = agent.run([*messages, ChatMessage.from_user(question)])["messages"]
        answers.append(messages[-1].text)
    return answers


@uses("instructor")
def instructor():
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI())
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    return [client.chat.completions.create(model="policy", messages=messages, response_model=Sum).total]


@uses("instructor")
def instructor_json():
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode.JSON_SCHEMA)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    return [client.chat.completions.create(model="policy", messages=messages, response_model=Sum).total]


@uses("langchain", "langchain-openai")
def langchain():
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="policy"), tools=[add, multiply], system_prompt=SYSTEM)
    messages, answers = [], []
    for question in QUESTIONS:
        messages = agent.invoke({"messages": [*messages, {"role": "user", "content": question}]})["messages"]
        answers.append(messages[-1].content)
    return answers


@uses("langchain", "langchain-openai")
def langchain_structured():
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="policy"), tools=[add], system_prompt=SYSTEM, response_format=Sum)
    state = agent.invoke({"messages": [{"role": "user", "content": QUESTIONS[0]}]})
    return [state["structured_response"].total]


@uses("langchain-openai")
def langchain_json():
    from langchain_openai import ChatOpenAI

    return [ChatOpenAI(model="policy").with_structured_output(Sum).invoke(QUESTIONS[0]).total]


@uses("langgraph", "langchain-openai")
def langgraph():
    from langchain_openai import ChatOpenAI
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    model = ChatOpenAI(model="policy").bind_tools([add, multiply])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke([("system", SYSTEM), *state["messages"]])]})
    graph.add_node("tools", ToolNode([add, multiply]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    agent, thread = graph.compile(checkpointer=InMemorySaver()), {"configurable": {"thread_id": "1"}}
    return [agent.invoke({"messages": [("user", q)]}, thread)["messages"][-1].content for q in QUESTIONS]


@uses("litellm")
def litellm():
    import litellm

    messages, answers = [{"role": "system", "content": SYSTEM}], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while messages[-1]["role"] != "assistant":
            message = litellm.completion("openai/policy", messages, tools=FUNCTIONS).choices[0].message
            messages.append(message.model_dump())
            for call in message.tool_calls or ():
                result = run_tool(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        answers.append(messages[-1]["content"])
    return answers


@uses("llama-index-core", "llama-index-llms-openai-like")
async def llama_index():
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.workflow import Context
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model="policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True, is_function_calling_model=True,
    )  # fmt: skip
    agent = FunctionAgent(tools=[add, multiply], llm=llm, system_prompt=SYSTEM)
    context = Context(agent)
    return [str(await agent.run(question, ctx=context)) for question in QUESTIONS]


@uses("magentic")
def magentic():
    from magentic import Chat, FunctionCall, OpenaiChatModel, SystemMessage

    model, types = OpenaiChatModel("policy"), [FunctionCall, str]
    chat = Chat([SystemMessage(SYSTEM)], model=model, functions=[add], output_types=types)
    chat = chat.add_user_message(QUESTIONS[0]).submit().exec_function_call().submit()
    return [chat.last_message.content]


@uses("magentic")
def magentic_structured():
    from magentic import OpenaiChatModel, prompt

    @prompt(QUESTIONS[0], model=OpenaiChatModel("policy"))
    def total() -> Sum: ...

    return [total().total]


@uses("marvin")
def marvin():
    import marvin

    agent = marvin.Agent(name="calculator", instructions=SYSTEM, tools=[add], model="openai:policy")
    return [agent.run(QUESTIONS[0], result_type=int, handlers=[])]


@uses("openai-agents")
async def openai_agents_structured():
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model="policy", openai_client=AsyncOpenAI())
    agent = Agent(name="c", instructions=SYSTEM, tools=[function_tool(add)], model=model, output_type=Sum)
    return [(await Runner.run(agent, QUESTIONS[0])).final_output.total]


@uses("pydantic-ai-slim")
async def pydantic_ai_structured():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel

    agent = Agent(OpenAIChatModel("policy"), instructions=SYSTEM, tools=[add], output_type=Sum)
    return [(await agent.run(QUESTIONS[0])).output.total]


@uses("semantic-kernel")
async def semantic_kernel():
    from semantic_kernel.agents import ChatCompletionAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Calculator:
        add = staticmethod(kernel_function(add))
        multiply = staticmethod(kernel_function(multiply))

    service = OpenAIChatCompletion(ai_model_id="policy")
    agent = ChatCompletionAgent(service=service, name="calculator", instructions=SYSTEM, plugins=[Calculator()])
    thread, answers = None, []
    for question in QUESTIONS:
        answer = await agent.get_response(question, thread=thread)
        thread = answer.thread
        answers.append(str(answer))
    return answers


@uses("smolagents")
def smolagents_code():
    from smolagents import CodeAgent, OpenAIModel, tool

    agent = CodeAgent(tools=[tool(add)], model=OpenAIModel("policy"), verbosity_level=0)
    return [agent.run(QUESTIONS[0])]


@uses("smolagents")
def smolagents_tools():
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    agent = ToolCallingAgent(tools=[tool(add)], model=OpenAIModel("policy"), verbosity_level=0)
    return [agent.run(QUESTIONS[0])]


@uses("strands-agents")
def strands():
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    model = OpenAIModel(model_id="policy")
    agent = Agent(model=model, tools=[tool(add), tool(multiply)], system_prompt=SYSTEM, callback_handler=None)
    return [str(agent(question)).strip() for question in QUESTIONS]


@uses("strands-agents")
def strands_structured():
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    agent = Agent(model=OpenAIModel(model_id="policy"), tools=[tool(add)], callback_handler=None)
    return [agent(QUESTIONS[0], structured_output_model=Sum).structured_output.total]


def main():
    """Run the agent that the command line names."""
    agent = globals()[sys.argv[1]]
    answers = agent()
    if inspect.isawaitable(answers):
        answers = asyncio.run(answers)
    tell(Wire(), answers, **{name: version(name) for name in agent.distributions})


if __name__ == "__main__":
    main()
